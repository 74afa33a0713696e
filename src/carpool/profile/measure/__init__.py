"""`carpool profile`: trainings run alone and beside each other on this machine's GPU, timed through the channel.

`plan.py` says what to measure and in which order, `pool.py` keeps the processes (`worker.py`) alive between them,
`timing.py` turns their reports into times with an error, `raw.py` keeps every measurement in a file that a later call
resumes from, `session.py` does it all within a budget, and `conclude.py` makes a profile of what was measured.
"""
