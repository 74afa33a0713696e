"""Policies that let a job share the GPUs of running jobs, pair by pair. Theorem 1 is in `pair`."""
