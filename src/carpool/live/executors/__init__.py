"""Executors: the contract that the service relies on, the executor for this machine, and the registry of names."""
