"""The report of `carpool paper`: the paper's evaluation, run again and shown beside the paper's own numbers.

`config.py` reads what to run (`paper.toml`), `plan.py` lists the runs, and `runs.py` simulates them or finds them in
the cache. `tables.py`, `claims*.py` and `figures*.py` turn results into tables, verdicts and pictures, and `page.py`
into one HTML file. `assemble.py` writes the folder, and `carpool.commands.paper` calls it.
"""
