"""Retention: which files of ended jobs are removed, and when."""

import os

from carpool.live.home import write_private
from carpool.live.service.pruner import RetentionLimits, prune, size_of


def test_old_files_are_removed_and_then_the_oldest_while_the_total_is_too_large(home):
    home.create()
    for job in range(1, 6):
        (home.job(str(job)) / "attempt-1").mkdir(parents=True)
        write_private(home.job(str(job)) / "attempt-1" / "stdout.log", "x" * 100_000, sync=False)
    each = size_of(home.job("1"))
    ended = [("1", 10.0), ("2", 950.0), ("3", 900.0), ("4", 990.0)]  # and 5 still runs
    assert prune(home, ended, 1000.0, RetentionLimits(seconds=500.0, size=10**9)) == ["1"]
    assert prune(home, ended, 1000.0, RetentionLimits(seconds=500.0, size=2 * each)) == ["3"]
    assert sorted(os.listdir(home.jobs)) == ["2", "4", "5"]
