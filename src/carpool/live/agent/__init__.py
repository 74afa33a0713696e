"""The agent of a node: the local executor, driven by a service elsewhere through one exchange."""
