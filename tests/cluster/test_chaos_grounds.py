"""A short round of the chaos on Slurm that `make chaos` plays at length, there also on Ray."""

from tests.cluster.chaos_grounds import play


def test_chaos_on_slurm_finds_no_job_lost_or_doubled(tmp_path):
    assert play("slurm", tmp_path, faults=10, seed=7) == []
