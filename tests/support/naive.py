"""SJF-BSBF written down plainly, without indexes, shapes or thresholds: slow, and easy to compare with the paper. And
the choice of policies that preempt, by sorting all jobs."""

from itertools import combinations

from carpool.core.model import Status, accumulations
from carpool.core.perf import Placement


def naive_bsbf(state) -> dict[str, tuple[frozenset[int], int]]:
    """Return the jobs that start, with their GPUs and their accumulation."""
    on = {gpu: [(r, r.accumulation) for r in state.jobs_on(gpu)] for gpu in sorted(state.topology.node_of)}
    plan = {}
    waiting = [r for r in state.jobs.values() if r.status is Status.PENDING]
    for guest in sorted(waiting, key=lambda r: (-r.shape.priority, left(state, r), r.seq)):
        if over_limit(state, guest, plan):
            continue
        place = alone(state, on, guest) or share(state, on, guest)
        if place:
            gpus, accumulation = place
            plan[guest.job.id] = (frozenset(gpus), accumulation)
            for gpu in gpus:
                on[gpu].append((guest, accumulation))
    return plan


def over_limit(state, guest, plan) -> bool:
    limits = state.limits.get(guest.job.user) or state.limits.get("")
    if limits is None:
        return False
    mine = [r for r in state.jobs.values() if r.job.user == guest.job.user and (r.gpus or r.job.id in plan)]
    gpus = sum(r.job.gpus for r in mine) + guest.job.gpus
    return (limits.jobs is not None and len(mine) >= limits.jobs) or (limits.gpus is not None and gpus > limits.gpus)


def sizes(guest) -> list[int]:
    return list(accumulations(guest.job.batch)) if guest.job.can_shrink else [1]


def memory_of(state, gpu) -> int:
    return state.topology.nodes[state.topology.node_of[gpu]].memory


def needs(state, record, accumulation) -> int:
    return state.perf.memory(record.job, accumulation)


def iteration(state, record, accumulation) -> float:
    job = record.job
    return state.perf.iteration_time(job, accumulation, Placement(job.gpus, state.perf.fewest_nodes(job.gpus)))


def left(state, record, accumulation=None) -> float:
    """Return the time left alone at the largest sub-batch that fits the largest GPU, or at the given accumulation."""
    if accumulation is None:
        largest = max(node.memory for node in state.topology.nodes)
        accumulation = next((s for s in sizes(record) if needs(state, record, s) <= largest), sizes(record)[-1])
    return (record.job.iterations - record.done) * iteration(state, record, accumulation)


def alone(state, on, guest):
    for accumulation in sizes(guest):
        free = [g for g in on if not on[g] and memory_of(state, g) >= needs(state, guest, accumulation)]
        if len(free) >= guest.job.gpus:
            return consolidated(state, free, guest.job.gpus), accumulation
    return None


def consolidated(state, gpus, count):
    """Return GPUs on the fewest nodes, then the fullest nodes, then the lowest numbers, by trying all sets of nodes."""
    by_node = {}
    for gpu in gpus:
        by_node.setdefault(state.topology.node_of[gpu], []).append(gpu)
    picked = []
    while len(picked) < count:
        short = count - len(picked)
        fewest = next(
            n for n in range(1, len(by_node) + 1) if any(_room(by_node, c) >= short for c in combinations(by_node, n))
        )
        if fewest == 1:
            number = min((len(g), n) for n, g in by_node.items() if len(g) >= short)[1]
        else:
            number = min((-len(g), n) for n, g in by_node.items())[1]
        picked += by_node.pop(number)[:short]
    return picked


def _room(by_node, chosen) -> int:
    return sum(len(by_node[number]) for number in chosen)


def share(state, on, guest):
    if guest.job.exclusive:
        return None
    at_least = 1
    while True:
        picked = gather(state, on, guest, at_least)
        if picked is None:
            return None
        gpus, accumulations = picked
        if len(set(accumulations)) == 1:
            return gpus, accumulations[0]
        at_least = max(accumulations)


def gather(state, on, guest, at_least):
    cells = {}
    for gpu, residents in on.items():
        if 0 < len(residents) < state.jobs_per_gpu and not any(r.job.exclusive for r, _ in residents):
            cells.setdefault(tuple(r.seq for r, _ in residents), []).append(gpu)
    found = []
    for gpus in cells.values():
        verdict = judge(state, on, guest, gpus, at_least)
        if verdict:
            together, accumulation, fitting = verdict
            found.append((together, len(on[gpus[0]]), on[gpus[0]][0][0].seq, fitting, accumulation))
    picked, accumulations = [], []
    for *_, gpus, accumulation in sorted(found):
        short = guest.job.gpus - len(picked)
        if short == 0:
            break
        accumulations.append(accumulation)
        picked += gpus if len(gpus) <= short else consolidated(state, gpus, short)
    if not accumulations:
        return None
    short = guest.job.gpus - len(picked)
    free = [g for g in on if not on[g] and memory_of(state, g) >= needs(state, guest, max(accumulations))]
    if short > len(free):
        return None
    return picked + (consolidated(state, free, short) if short else []), accumulations


def judge(state, on, guest, gpus, at_least):
    """Run Algorithm 2 against the jobs on these GPUs."""
    residents = on[gpus[0]]
    single = len(residents) == 1
    best = None
    for accumulation in sizes(guest):
        if accumulation < at_least:
            continue
        fitting = [g for g in gpus if allowed(state, on, guest, accumulation, g)]
        # the GPUs of a lone host count as a whole: all of them fit, or none
        if not fitting or (single and len(fitting) < len(gpus)):
            continue
        times = [
            pair_times(state, guest, accumulation, host, host_accumulation) for host, host_accumulation in residents
        ]
        worst = max(together for together, _ in times)
        pays = all(together < apart * (1 - 1e-9) for together, apart in times)
        if best is None or worst < best[0]:
            best = (worst, accumulation, tuple(fitting), pays)
        if not single:
            break  # several hosts: the largest sub-batch that fits
    return best[:3] if best and best[3] else None


def allowed(state, on, guest, accumulation, gpu) -> bool:
    jobs = [(r.job, s, r.memory or needs(state, r, s)) for r, s in on[gpu]]
    jobs.append((guest.job, accumulation, needs(state, guest, accumulation)))
    if sum(memory for _, _, memory in jobs) > memory_of(state, gpu):
        return False
    for job, s, _ in jobs:
        mates = [(other, t) for other, t, _ in jobs if other is not job]
        if job.max_slowdown is not None and state.perf.slowdown(job, s, mates) > job.max_slowdown:
            return False
    return True


def pair_times(state, guest, accumulation, host, host_accumulation) -> tuple[float, float]:
    """Return the sum of completion times if both run together from now on, and if they run one after the other."""
    host_left = host.alone_left(state.now) if host.gpus else left(state, host, host_accumulation)
    guest_left = left(state, guest, accumulation)
    host_xi = state.perf.slowdown(host.job, host_accumulation, [(guest.job, accumulation)])
    guest_xi = state.perf.slowdown(guest.job, accumulation, [(host.job, host_accumulation)])
    first = min(host_left * host_xi, guest_left * guest_xi)
    host_end = first if host_left * host_xi <= first else first + host_left - first / host_xi
    guest_end = first if guest_left * guest_xi <= first else first + guest_left - first / guest_xi
    return host_end + guest_end, 2 * host_left + left(state, guest)


def naive_choice(view, running, key, left, most):
    """Return which jobs stop and which start if `left` GPUs go to the first of all jobs; see `preemption`."""
    keep, start, held = [], [], {}

    def rank(job):
        tenants = view.rank_of(job, held.get(job.job.group)) if view.shares_count else ()
        return -job.shape.priority, tenants, key(job, view.now), job.seq

    order = sorted(running)
    others = list(view.queue)
    while others or order:
        if not others or (order and order[0][0] < min(map(rank, others))):
            _, job = order.pop(0)
            if job.shape.gpus <= left:
                keep.append(job)
                left -= job.shape.gpus
            continue
        job = min(others, key=rank)
        others.remove(job)
        if job.shape.gpus <= left and sum(one.shape is job.shape for one in start) < most.get(job.shape, 99):
            start.append(job)
            left -= job.shape.gpus
            group = job.job.group
            held[group] = held.get(group, view.held_by_group(group)) + job.shape.gpus
    return [job for _, job in sorted(running) if job not in keep], start
