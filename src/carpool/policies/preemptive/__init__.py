"""Policies that suspend running jobs in favour of others: all jobs are sorted by one key, the first get the GPUs."""
