"""What a sharing policy compared for a job that waits: the job beside each running job that has room for it.

The policies of this family and the joint rule call it from their `explain`, which `carpool explain` shows.
"""

from itertools import islice

from carpool.core.model import GpuId, Status
from carpool.core.view import JobView, View
from carpool.policies.base import Explanation, PairComparison
from carpool.policies.sharing import pair

HOSTS_COMPARED = 200
"""Maximum number of running jobs that one explanation looks at."""
ASKED_NOT_TO_SHARE = Explanation("it asked not to share")
FITS_BESIDE_NO_JOB = Explanation("it fits beside no running job within the limits of both jobs and the memory")


def compare_hosts(view: View, guest: JobView) -> list[PairComparison]:
    """Compare sharing with waiting by Theorem 1 for each running job that has room.

    Hosts with which sharing pays come first, by the sum of completion times, as SJF-BSBF ranks them; then the others,
    by how much sharing loses.
    """
    found = []
    guest_left = guest.alone_left(view.now)
    for host in islice(view.running, HOSTS_COMPARED):
        gpus = gpus_with_room(view, host)
        if not gpus:
            continue
        memory_left = min(view.topology.memory_of(gpu) - view.memory_used(gpu) for gpu in gpus)
        host_left = host.alone_left(view.now)
        fitting = pair.options(view.perf, guest, host.job, host.accumulation, memory_left)
        verdict = pair.least_together(fitting, host_left, guest_left)
        if verdict is not None:
            share_s, option = verdict
            found.append(
                PairComparison(
                    host.job.id,
                    option.guest_xi,
                    option.host_xi,
                    share_s,
                    pair.apart(host_left, guest_left),
                    pair.pays(share_s, host_left, guest_left),
                )
            )
    found.sort(key=lambda one: (not one.pays, one.share_s if one.pays else one.share_s - one.wait_s))
    return found


def gpus_with_room(view: View, host: JobView) -> list[GpuId]:
    """Return the GPUs of a running job on which one more job may run; none for a job that shares with no other."""
    if host.shape.exclusive or host.batch is not None or host.status is Status.CANCELLING:
        return []
    return [gpu for gpu in host.gpus if len(view.jobs_on(gpu)) < view.jobs_per_gpu]
