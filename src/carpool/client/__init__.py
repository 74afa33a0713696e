"""Carpool from Python: `carpool.connect` submits and follows jobs, `carpool.Executor` runs functions as jobs.

Both are clients of the HTTP API, and need nothing of the service but its address.
"""
