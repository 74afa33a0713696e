"""`carpool paper`: the paper's evaluation, run again and shown beside the paper's own numbers.

`config.py` reads what to run (`paper.toml`), `plan.py` lists the runs, `runs.py` makes them or finds them in the
cache; `tables.py`,
`claims.py` and the `figures*.py` turn results into what a reader sees, `page.py` into one HTML file. `command.py`
ties them together.
"""
