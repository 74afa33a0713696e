"""Policies that let a job share the GPUs of running jobs. Theorem 1, which decides about pairs, is in `pair`."""
