"""Gangs as real processes: what the service wants of an executor, the one for this machine, and its GPUs."""
