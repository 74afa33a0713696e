# Everything a user or a contributor runs. Needs Python 3.11 or later, make, and a package index for the first install.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An environment variable, so that pip also pins what it builds with.
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip
NEXT := printf '\n%s\n' 'carpool is installed in $(VENV). To use it in this shell: . $(BIN)/activate'

# Which tests `make tests` runs, as pytest -m understands it.
MARKS := not alone and not cluster and not browser

# $(call pytest,how,which) runs tests. Many of them wait for other processes, and a busy machine can make one too late.
# So where CI is set, tests that failed run once more, one after another and with nothing beside them; those that fail
# again fail the build. The output keeps both, because a test that needs a second try is to be fixed.
AGAIN = echo 'Tests failed. They run once more, by themselves.'; $(BIN)/python -m pytest --last-failed --last-failed-no-failures none
pytest = $(BIN)/python -m pytest $(1) $(2)$(if $(CI), || { $(AGAIN) $(2); })

.PHONY: install demo demo-sim quick test tests thorough test-cluster test-browser chaos attack lint types bench study docs dist clean

install: $(VENV)/.installed
	@$(NEXT)

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --editable '.[plots,fit,live]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.installed-cluster: $(VENV)/.installed-dev
	$(PIP) install --quiet --editable '.[ray]'
	touch $@

$(VENV)/.installed-demo: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[live,train]'
	touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/carpool demo
	@$(NEXT)

demo-sim: $(VENV)/.installed
	$(BIN)/carpool compare --seeds 1-8 --loads 1,2 --jobs 240 --out out/demo
	$(BIN)/carpool simulate --policy sjf-bsbf --cluster 4x4 --jobs 60 --load 0.3 --seed 2 --out out/demo-run
	@echo "Pictures: out/demo/mean_jct.png, out/demo/jct_cdf.png, out/demo-run/gantt.png"

# mypy runs beside the tests, which often wait for other processes. Tests that measure times run afterwards, by
# themselves; only their files are imported.
test: lint
	$(MAKE) --jobs 2 types tests
	$(call pytest,,-m 'alone and not cluster and not browser' $$(grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests))

# Three processes on two cores, because tests often wait. Each takes whole files, so that a module's fixtures are set up
# once; the longest files come first (tests/conftest.py).
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
tests: $(VENV)/.installed-dev
	$(call pytest,$(PARALLEL),-m '$(MARKS)')

# The same with the full number of random cases and with the longest comparisons: before a release.
thorough:
	CARPOOL_THOROUGH=1 $(MAKE) test

# The checks to run before every commit: below two minutes on two cores.
quick: lint
	$(MAKE) --jobs 2 types tests MARKS='not slow and not alone and not cluster and not browser'

# Tests against real servers. Each script in .ci/servers installs one of them if it is missing, as root with apt.
test-cluster: $(VENV)/.installed-cluster
	for script in .ci/servers/*; do "$$script" || exit 1; done
	$(call pytest,$(PARALLEL),-m cluster tests/cluster)

# The dashboard in a real Chromium. The script installs it if it is missing, as root with apt, and axe-core with npm.
test-browser: $(VENV)/.installed-dev
	$(PIP) install --quiet --editable '.[browser]'
	.ci/browser
	$(call pytest,,-m browser tests/browser)

chaos: $(VENV)/.installed-cluster
	for script in .ci/servers/*; do "$$script" || exit 1; done
	$(BIN)/python tests/live/service/chaos.py --rounds 500 --seed 1 --show
	$(BIN)/python tests/live/chaos_outside.py --kills 100 --seed 1
	$(BIN)/python -m tests.cluster.chaos_postgres --faults 200 --seed 1
	$(BIN)/python -m tests.cluster.chaos_agents --faults 200 --seed 1
	$(BIN)/python -m tests.cluster.chaos_pair --faults 200 --seed 1
	$(BIN)/python -m tests.cluster.chaos_grounds slurm --faults 200 --seed 1
	$(BIN)/python -m tests.cluster.chaos_grounds ray --faults 200 --seed 1

# Attacks from outside on a real service (as root also with users of their own), and damaged inputs for every parser:
# about five minutes. `make test` runs a short form of both.
attack: $(VENV)/.installed-dev
	$(BIN)/python -m tests.attack.outside
	$(BIN)/python -m tests.attack.fuzz --seconds 60

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python bench/speed.py

study: $(VENV)/.installed
	$(BIN)/carpool study --out docs/experiments --cache out/study.jsonl

# The documentation site in out/site. Warnings such as a broken link fail the build.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in out/site; to read it: $(BIN)/mkdocs serve"

# A source archive and a wheel in dist/. Leftovers of earlier builds would end up in them.
dist: $(VENV)/.installed-dev
	rm -rf build dist src/*.egg-info
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
