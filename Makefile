# Everything a user or a contributor runs. Needs Python 3.11 or later, make, and a package index for the first install.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An environment variable, so that pip also pins what it builds with.
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip

.PHONY: install demo demo-sim test chaos lint types bench study clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --editable '.[plots,fit,live]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.installed-demo: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[live,train]'
	touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/carpool demo

demo-sim: install
	$(BIN)/carpool compare --seeds 1-8 --loads 1,2 --jobs 240 --out out/demo
	$(BIN)/carpool simulate --policy sjf-bsbf --cluster 4x4 --jobs 60 --load 0.3 --seed 2 --out out/demo-run
	@echo "Pictures: out/demo/mean_jct.png, out/demo/jct_cdf.png, out/demo-run/gantt.png"

# Two processes, each taking whole files: what a file starts once for all its tests is still started once. Tests whose
# figures move when something runs beside them follow by themselves.
test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not alone'
	$(BIN)/python -m pytest -m alone

chaos: $(VENV)/.installed-dev
	$(BIN)/python tests/live/chaos.py --rounds 500 --seed 1 --show

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

bench: install
	$(BIN)/python bench/speed.py

study: install
	$(BIN)/carpool study --out docs/experiments --cache out/study.jsonl

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
