"""How evenly a run treats tenants: finish-time fairness ρ and Jain's index.

ρ of a tenant is the mean completion time of its jobs over the one that they would have with the tenant's share of the
cluster to themselves, under exclusive SJF. Below 1 the tenant gains from sharing a cluster with others; the worst ρ is
what the tenant that gains least has. A tenant is a group, or a user where no job has a group. `sim.run.simulate` calls
`measure` where a setup asks for it, and `carpool history --fairness` does for what ran in a service.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING

from carpool.core.model import Job
from carpool.core.record import JobRecord

if TYPE_CHECKING:
    from carpool.sim.run import Setup


@dataclass(frozen=True, slots=True)
class TenantResult:
    """What one tenant got. Times are in seconds."""

    tenant: str
    jobs: int
    mean_jct_s: float
    own_jct_s: float
    """Mean completion time with its share of the cluster to itself, exclusive SJF."""
    rho: float
    """Finish-time fairness: the first over the second."""
    gpu_s: float
    """GPU-seconds that its jobs held."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """How evenly tenants are treated."""

    worst_rho: float
    mean_rho: float
    spread_rho: float
    """Largest ρ over smallest."""
    jain: float
    """Jain's index of the GPU time over the share: 1 if all have the same, 1/n if one has everything."""
    tenants: tuple[TenantResult, ...]
    """Worst first."""


def tenant_of(job: Job, by_group: bool) -> str:
    """Return the tenant of a job."""
    return job.group if by_group else job.user


def measure(
    records: Iterable[JobRecord], own_jcts: Mapping[str, float], weights: Mapping[str, float]
) -> Fairness | None:
    """Return how evenly the tenants of finished jobs were treated; None where there is one tenant or none."""
    done = [(record.job, record.ended - record.job.submitted, record.served) for record in records]
    return measure_jobs(done, own_jcts, weights)


def measure_jobs(
    done: Sequence[tuple[Job, float, float]], own_jcts: Mapping[str, float], weights: Mapping[str, float]
) -> Fairness | None:
    """Return the same for jobs with their completion times and GPU-seconds."""
    by_tenant: dict[str, list[tuple[float, float]]] = {}
    by_group = has_groups([job for job, _, _ in done])
    for job, jct, gpu_s in done:
        by_tenant.setdefault(tenant_of(job, by_group), []).append((jct, gpu_s))
    if len(by_tenant) < 2:
        return None
    results = []
    for tenant, own in by_tenant.items():
        mean, alone = fmean([jct for jct, _ in own]), own_jcts[tenant]
        gpu_s = sum([held for _, held in own])
        results.append(TenantResult(tenant, len(own), mean, alone, mean / alone if alone else 1.0, gpu_s))
    results.sort(key=lambda result: (-result.rho, result.tenant))
    rhos = [result.rho for result in results]
    shares = [result.gpu_s / weights.get(result.tenant, 1.0) for result in results]
    spread = rhos[0] / rhos[-1] if rhos[-1] else 1.0
    return Fairness(rhos[0], fmean(rhos), spread, jain_index(shares), tuple(results))


def jain_index(values: Sequence[float]) -> float:
    """Return Jain's index: (Σx)² / (n · Σx²)."""
    squares = sum([value * value for value in values])
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def has_groups(jobs: Iterable[Job]) -> bool:
    """Return whether some job has a group."""
    return any(job.group for job in jobs)


def jobs_of_tenants(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Return the jobs of each tenant."""
    by_group = has_groups(jobs)
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(tenant_of(job, by_group), []).append(job)
    return found


def own_jcts(jobs: Sequence[Job], setup: "Setup") -> dict[str, float]:
    """Return the mean completion time that each tenant would have with its share of the cluster to itself.

    The share is rounded up to whole GPUs, and to the tenant's largest gang. All GPUs are on one node if the cluster's
    nodes are larger, else on whole nodes of the cluster's size.
    """
    from carpool.sim.run import node_sizes, simulate
    from carpool.sim.workload import Workload

    by_tenant = jobs_of_tenants(jobs)
    weights = tenant_weights(setup)
    total = sum([weights.get(tenant, 1.0) for tenant in by_tenant])
    sizes = node_sizes(setup.cluster)
    size = max(sizes)
    found = {}
    for tenant, own in by_tenant.items():
        share = ceil(sum(sizes) * weights.get(tenant, 1.0) / total - 1e-9)
        gpus = max(share, max(job.gpus for job in own))
        shape = f"1x{gpus}" if gpus <= size else f"{-(-gpus // size)}x{size}"
        alone = replace(setup, cluster=shape, fair_share=0.0, groups=(), closures=(), fairness=False)
        alone = replace(alone, belief=None, report_error=0.0, guesses=())
        apart = tuple(replace(job, after=()) for job in own)
        found[tenant] = simulate(Workload(apart), "sjf", alone).summary.mean_jct_s
    return found


def least_worst_rho(jobs: Sequence[Job], own_jcts: Mapping[str, float], setup: "Setup") -> float:
    """Return a worst ρ that no schedule is below: that of a run in which every job starts when it is submitted and has
    its GPUs to itself.

    Without it a target for the worst ρ may be one that no order of jobs reaches: a tenant whose jobs never wait with
    its share to itself cannot have ρ < 1. The bound does not hold for a policy that changes the batch or the number of
    GPUs of a job, as Pollux does, because such a job may run faster than alone on the GPUs that it asked for.
    """
    from carpool.sim.mixes import find_mixes
    from carpool.sim.run import cluster_nodes, true_model
    from carpool.sim.workload import Workload

    model = true_model(Workload(tuple(jobs)), setup)
    run_s = find_mixes(jobs, model, cluster_nodes(setup), jobs_per_gpu=1).alone_s
    run_s_of = {job.id: setup.costs.launch_s + seconds for job, seconds in zip(jobs, run_s, strict=True)}
    bounds = [
        fmean([run_s_of[job.id] for job in own]) / own_jcts[tenant] if own_jcts[tenant] else 1.0
        for tenant, own in jobs_of_tenants(jobs).items()
    ]
    return max(bounds)


def tenant_weights(setup: "Setup") -> dict[str, float]:
    """Return the weights of groups that have one of their own."""
    return {group.name: group.weight for group in setup.groups}
