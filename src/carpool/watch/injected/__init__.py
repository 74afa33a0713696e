"""The folder that a watched job has in front of its `PYTHONPATH`: see `carpool.watch`."""
