"""The live service: the scheduler of `core` with a real clock, a journal on disk, and real processes."""
