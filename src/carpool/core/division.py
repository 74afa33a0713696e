"""How a GPU that several jobs hold is divided among them: the one rule behind shares of tenants and accounts.

A GPU counts in equal parts for the jobs that compute on it or are about to; if all jobs there are paused, for all of
them. So each GPU-second that jobs hold counts once. `charging` and `accounts` ask for a job's part.
"""

from carpool.core.cluster import Cluster
from carpool.core.record import JobRecord


def held_and_shared(cluster: Cluster, record: JobRecord) -> tuple[float, float]:
    """Return a job's part of its GPUs, and how much of that is on GPUs that it computes on beside other jobs."""
    residents, held, shared = cluster.residents, 0.0, 0.0
    for gpu in record.gpus:
        there = residents[gpu]
        if len(there) == 1:
            held += 1.0
            continue
        active = sum([other.active for other in there])
        if record.active or not active:
            part = 1.0 / (active or len(there))
            held += part
            if active > 1:
                shared += part
    return held, shared
