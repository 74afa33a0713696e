"""A short round of the chaos that `make chaos` plays at length."""

from tests.cluster.chaos_agents import play


def test_chaos_finds_no_job_lost_or_doubled(tmp_path):
    assert play(tmp_path, faults=15, seed=5) == []
