"""`carpool profile`: measures trainings alone and beside each other on this machine's GPU, through the channel.

`plan.py` decides what to measure and in which order. `pool.py` keeps the processes (`worker.py`) alive between
measurements. `timing.py` turns their reports into times with an error. `raw.py` stores every measurement in a file from
which a later call resumes. `session.py` runs the plan within a budget; `conclude.py` makes a profile of the results.
"""
