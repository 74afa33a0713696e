"""Policies that stop running jobs in favour of others: all jobs stand in one order, the first get the GPUs."""
