"""A lower bound on the mean completion time of any schedule, preemptive or not (proof: docs/explanation/bounds.md).

GPU time gets a price that changes over time, and every job chooses the cheapest way to finish. For any prices, the
least that all jobs pay minus the most that the GPUs earn is a lower bound. A linear program, solved by SciPy's HiGHS,
finds good prices; the bound is valid for all prices. `carpool bound` and `carpool compare --bound` call `lower_bound`.
"""

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from carpool.errors import InputError
from carpool.sim.mixes import Mixes, find_mixes
from carpool.sim.run import Setup, cluster_nodes, true_model
from carpool.sim.workload import Workload

try:
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix
except ImportError:
    raise InputError("bounds need numpy and scipy; install them with: pip install 'carpool[fit]'") from None

Array = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]
MOST_JOBS = 20_000
INTERVALS = (30, 240)
"""Smallest and largest number of time intervals, each with its own prices. More intervals gain little."""
ROUNDS = 12
"""Number of rounds in which mixes that would earn more are added to the program."""
ADDED = 4
"""Number of mixes added for each interval in a round."""
ROUNDING = 1.0 - 1e-9
"""Factor that keeps a bound below the exact value in spite of rounding."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds on the mean completion time of any schedule of a workload on a cluster, in seconds."""

    sharing_s: float
    """Bound for schedules with up to `jobs_per_gpu` jobs on a GPU."""
    exclusive_s: float
    """Bound for schedules with one job on a GPU."""
    alone_s: float
    """Mean run time of the jobs, each alone on an empty cluster."""
    jobs: int
    jobs_per_gpu: int


@dataclass(frozen=True)
class BoundProblem:
    """A workload as arrays. Times count from the first submission."""

    release: Array
    need: Array
    """Run time of each job alone at full speed, in seconds."""
    gpus: Array
    job_class: Indices
    cluster: int
    mixes: Mixes
    edges: Array
    """Boundaries of the time intervals, from the start of the first to the end of the last."""

    @property
    def lengths(self) -> Array:
        return np.diff(self.edges)


def lower_bound(workload: Workload, setup: Setup) -> Bound:
    """Compute the bounds for a workload in a world. Beliefs and the costs of stopping do not matter for them."""
    if len(workload.jobs) > MOST_JOBS:
        raise InputError(f"bound: {workload.source} has more than {MOST_JOBS:,} jobs; give a smaller workload")
    alone = _problem(workload, replace(setup, jobs_per_gpu=1))
    exclusive = _best_bound(alone)
    sharing = exclusive
    if setup.jobs_per_gpu > 1:
        sharing = _best_bound(_problem(workload, setup))
        exclusive = max(exclusive, sharing)  # exclusive schedules are among those that may share
    least, delay = float(alone.need.mean()), setup.costs.launch_s
    return Bound(sharing + delay, exclusive + delay, least + delay, len(workload.jobs), setup.jobs_per_gpu)


def _best_bound(problem: BoundProblem) -> float:
    return max(bound_at(problem, _good_prices(problem)), one_machine(problem), float(problem.need.mean()))


def _problem(workload: Workload, setup: Setup) -> BoundProblem:
    nodes = cluster_nodes(setup)
    cluster = sum(len(node.gpus) for node in nodes)
    mixes = find_mixes(workload.jobs, true_model(workload, setup), nodes, setup.jobs_per_gpu)
    release = np.array([job.submitted for job in workload.jobs])
    need = np.array(mixes.alone_s)
    gpus = np.array([float(job.gpus) for job in workload.jobs])
    if gpus.max() > cluster:
        name = workload.jobs[int(gpus.argmax())].id
        raise InputError(f"{workload.where(name)}: gpus: job {name} does not fit on {cluster} GPUs; enlarge --cluster")
    release = release - release.min()
    edges = _grid(release, need, gpus, cluster)
    return BoundProblem(release, need, gpus, np.array(mixes.class_of), cluster, mixes, edges)


def _grid(release: Array, need: Array, gpus: Array, cluster: int) -> Array:
    """Return the interval boundaries: even while jobs arrive, then ever longer until even a serial schedule is done."""
    number = int(np.clip(2600 / np.sqrt(len(release)), *INTERVALS))
    last, tail = float(release.max()), float((gpus * need).sum() / cluster + need.max())
    even = number // 2 if last > 0.0 else 0
    step = last / even if even else tail / (20 * number)
    step = min(step, tail / (number - even))  # so that the later intervals do not shrink
    low, high = 1.0 + 1e-9, 10.0
    for _ in range(60):
        ratio = (low + high) / 2
        reach = step * (ratio ** (number - even) - 1) / (ratio - 1)
        low, high = (ratio, high) if reach < tail else (low, ratio)
    rest = step * np.cumsum(high ** np.arange(number - even))
    return np.concatenate([np.linspace(0.0, last, even + 1), last + rest * max(1.0, tail / rest[-1])])


def one_machine(problem: BoundProblem) -> float:
    """Return the mean completion time on one machine that has the speed of the whole cluster.

    It gives all its speed to the job with the least work left, which is optimal for it, and no cluster does better.
    On one GPU without sharing the value is exact.
    """
    speed = problem.cluster * float(_speeds(problem.mixes).sum(axis=1).max())
    arrivals = sorted(zip(problem.release, problem.gpus * problem.need / speed, strict=True))
    total = now = 0.0
    left: list[list[float]] = []
    for following, (release, need) in zip([*(r for r, _ in arrivals[1:]), np.inf], arrivals, strict=True):
        now = max(now, release)
        heappush(left, [need, release])
        while left and now < following:
            ran = min(left[0][0], following - now)
            now += ran
            left[0][0] -= ran
            if left[0][0] <= 0.0:
                total += now - heappop(left)[1]
    return total / len(arrivals) * ROUNDING


# ---- good prices: the linear program --------------------------------------------------------------------------------


def _good_prices(problem: BoundProblem) -> Array:
    """Return a price of work for each class and interval.

    The prices are the duals of a program in which work is a fluid and a job ends at its mean busy time plus half its
    length. Mixes are added to the program as long as its prices say that they would earn more.
    """
    classes, number = problem.mixes.classes, len(problem.lengths)
    speeds = _speeds(problem.mixes)
    chosen = np.zeros((len(speeds), number), dtype=bool)
    chosen[:classes] = True  # one job alone, for each class
    prices = np.zeros((classes, number))
    for _ in range(ROUNDS):
        prices, rent = _program(problem, speeds, chosen)
        worth = speeds @ prices
        worth[chosen] = 0.0
        best = np.argpartition(worth, -min(ADDED, len(worth)), axis=0)[-ADDED:]
        pays = np.take_along_axis(worth, best, axis=0) > rent * (1.0 + 1e-6) + 1e-12
        if not pays.any():
            break
        columns = np.broadcast_to(np.arange(number), best.shape)
        chosen[best[pays], columns[pays]] = True
    return prices


def _speeds(mixes: Mixes) -> Array:
    """Return the work that each mix does for each class in a second."""
    speeds = np.zeros((len(mixes.mixes), mixes.classes))
    for number, seats in enumerate(mixes.mixes):
        for seat in seats:
            speeds[number, seat.job_class] += seat.speed * seat.count
    return speeds


def _program(problem: BoundProblem, speeds: Array, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Array, Array]:
    """Solve the linear program; return the prices of work by class and interval, and the rent of a GPU by interval."""
    edges, lengths = problem.edges, problem.lengths
    number, classes = len(lengths), speeds.shape[1]
    begin = np.maximum(edges[:-1], problem.release[:, None])
    room = edges[1:] - begin
    job, interval = np.nonzero(room > 0.0)
    middle = (begin[job, interval] + edges[interval + 1]) / 2
    cost = middle / problem.need[job]
    mix, when = np.nonzero(chosen)
    works, rents = len(job), len(mix)
    seat_mix, seat_class = np.nonzero(speeds[mix])
    rows = [problem.job_class[job] * number + interval, seat_class * number + when[seat_mix], classes * number + when]
    columns = [np.arange(works), works + seat_mix, works + np.arange(rents)]
    values = [problem.gpus[job], -speeds[mix[seat_mix], seat_class], np.ones(rents)]
    shape = ((classes + 1) * number, works + rents)
    limits = csr_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=shape)
    jobs = csr_matrix((np.ones(works), (job, np.arange(works))), shape=(len(problem.need), works + rents))
    most = np.concatenate([room[job, interval], np.full(rents, np.inf)])
    found = linprog(
        np.concatenate([cost, np.zeros(rents)]),
        A_ub=limits,
        b_ub=np.concatenate([np.zeros(classes * number), problem.cluster * lengths]),
        A_eq=jobs,
        b_eq=problem.need,
        bounds=np.column_stack([np.zeros(works + rents), most]),
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    duals = np.maximum(0.0, -found.ineqlin.marginals).reshape(classes + 1, number)
    return duals[:-1], duals[-1]


# ---- the bound at given prices --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tariff:
    """Prices of work for one class. Each step has an interval, the speed that it adds, and a price per work.

    Steps of all intervals are sorted by price, cheapest first.
    """

    interval: Indices
    speed: Array
    price: Array


def bound_at(problem: BoundProblem, prices: Array) -> float:
    """Return the lower bound that follows from prices of work. It is valid for any prices that are not negative."""
    seats, rent = seat_prices(problem.mixes, prices)
    earned = problem.cluster * float((problem.lengths * rent).sum())
    # after the last interval work costs nothing
    edges = np.append(problem.edges, problem.edges[-1] + problem.need.max())
    tariffs = []
    for job_class in range(problem.mixes.classes):
        speed, price = seats[job_class]
        tariffs.append(tariff(speed, np.column_stack([price, np.zeros(len(price))])))
    paid = 0.0
    for release, need, gpus, job_class in zip(
        problem.release, problem.need, problem.gpus, problem.job_class, strict=True
    ):
        paid += cheapest_end(tariffs[job_class], edges, float(release), float(need), float(gpus)) - release
    return float(paid - earned) / len(problem.need) * ROUNDING


def seat_prices(mixes: Mixes, prices: Array) -> tuple[list[tuple[Array, Array]], Array]:
    """Return for each class the speeds and prices of its seats by interval, and the rent of a GPU by interval.

    A seat costs what its work is worth. If the seats of a mix earn less than the best mix, their prices are raised
    until they earn as much: the rent stays the same, and jobs pay at least as much.
    """
    speeds = _speeds(mixes)
    rent = (speeds @ prices).max(axis=0)
    prices = np.maximum(prices, rent * 1e-9)  # so that no mix earns zero, which cannot be raised by a factor
    worth = speeds @ prices
    rent = worth.max(axis=0)
    raised = np.divide(rent, worth, out=np.ones_like(worth), where=worth > 0.0)
    by_class: list[tuple[list[float], list[Array]]] = [([], []) for _ in range(mixes.classes)]
    for number, seats in enumerate(mixes.mixes):
        for seat in seats:
            by_class[seat.job_class][0].append(seat.speed)
            by_class[seat.job_class][1].append(seat.speed * prices[seat.job_class] * raised[number])
    return [(np.array(speed), np.array(price)) for speed, price in by_class], rent


def tariff(speed: Array, price: Array) -> Tariff:
    """Return the lower hull of the cost of speeds, interval by interval.

    A job never pays more for a speed than by switching between a cheaper, slower seat and a dearer, faster one.
    """
    number = price.shape[1]
    at_speed, at_price = np.zeros(number), np.zeros(number)
    steps: list[tuple[Indices, Array, Array]] = []
    while True:
        ahead = speed[:, None] - at_speed
        slope = np.full_like(price, np.inf)
        np.divide(price - at_price, ahead, out=slope, where=ahead > 1e-12)
        least = slope.min(axis=0)
        open_ = np.flatnonzero(np.isfinite(least))
        if not len(open_):
            break
        # the fastest seat on the next edge of the hull
        on_edge = np.where(slope <= least * (1.0 + 1e-12), speed[:, None], -1.0).argmax(axis=0)[open_]
        steps.append((open_, speed[on_edge] - at_speed[open_], least[open_]))
        at_speed[open_] = speed[on_edge]
        at_price[open_] += steps[-1][1] * steps[-1][2]
    interval, added, asked = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    order = np.argsort(asked, kind="stable")
    return Tariff(interval[order], added[order], asked[order])


def cheapest_end(costs: Tariff, edges: Array, release: float, need: float, gpus: float) -> float:
    """Return the least sum of a job's end and its gang's cost, over all ends and all ways to do the work before.

    Between two boundaries the cost is convex in the end, so it lies above its tangents at both. Their intersection is
    therefore at most the least cost.
    """
    first = int(np.searchsorted(edges, release + need, side="right")) - 1
    ends = np.concatenate([[release + need], edges[first + 1 :]])
    time = np.minimum(ends[:, None], edges[1:]) - np.maximum(edges[:-1], release)
    work = np.maximum(time, 0.0)[:, costs.interval] * costs.speed
    done = np.minimum(np.cumsum(work, axis=1), need)
    paid = ends + gpus * (np.diff(done, axis=1, prepend=0.0) @ costs.price)
    if len(ends) == 1:
        return float(paid[0])
    enough = done >= need * (1.0 - 1e-9)
    dearest = costs.price[np.where(enough[:, -1], enough.argmax(axis=1), len(costs.price) - 1)]
    later = costs.interval >= first
    where, speed, price = costs.interval[later] - first, costs.speed[later], costs.price[later]
    slopes = []
    for margin in (dearest[:-1], dearest[1:]):  # at the left end of each interval, and at its right end
        saved = gpus * speed * np.maximum(margin[where] - price, 0.0)
        slopes.append(1.0 - np.bincount(where, saved, len(ends) - 1))
    left, right = slopes
    length = np.diff(ends)
    inside = (left < 0.0) & (right > 0.0)
    bend = np.divide(paid[:-1] - paid[1:] + right * length, right - left, out=np.zeros_like(length), where=inside)
    lowest = np.where(inside, paid[:-1] + left * np.clip(bend, 0.0, length), np.minimum(paid[:-1], paid[1:]))
    return float(lowest.min())
