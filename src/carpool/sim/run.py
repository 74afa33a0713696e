"""One simulation from names that a user can type: cluster, profile, interference, policy, workload.

`simulate` is the entry point for scripts and notebooks; the command line and the sweeps call it too.
"""

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from time import process_time

from carpool import policies
from carpool.belief.model import Belief
from carpool.belief.prior import KAPPA, believe
from carpool.core import events as ev
from carpool.core.model import Closure, FairShare, Job, Node, UserGroup
from carpool.core.perf import (
    GENERIC,
    ConstantInterference,
    FittedModel,
    Interference,
    PerformanceModel,
    Placement,
    TableInterference,
)
from carpool.core.record import JobRecord
from carpool.core.rules import IllegalPlan
from carpool.core.scheduler import Policy
from carpool.core.state import RESIDENT_PER_GPU, State
from carpool.core.usage_report import UsageReport, report_usage
from carpool.errors import InputError, nearest
from carpool.policies.guarded import comes_from, failure_text
from carpool.profile.interference import read_interference
from carpool.profile.schema import Profile, load
from carpool.sim.engine import CannotFinish, Costs, Engine
from carpool.sim.estimation_error import MisestimatedSlowdowns, MisestimatedTimes
from carpool.sim.fairness import measure, own_jcts, tenant_weights
from carpool.sim.metrics import Summary, corrected_users, finished, summarise
from carpool.sim.unknown import REPORT_S, UNIQUE, UNKNOWN, RealModels, UnknownBelief, make_unique
from carpool.sim.workload import Workload, check_dependencies, check_ids

NO_COSTS = Costs()
REMEDIES = {
    "gpus": "; give a larger --cluster or cap, or the job fewer GPUs",
    "batch": "; give a larger --gpu-memory, or --no-memory-limit",
}
MOST_SLOWDOWN = 1000
LEARNED = "learned"
"""Name of the belief that starts from the profile alone and learns from what jobs report."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The simulated world: everything about a run except its jobs and its policy."""

    cluster: str = "16x4"
    """Nodes × GPUs per node; `4x8+2x4` has nodes of two sizes."""
    profile: str = "t4"
    """Source of iteration times and memory needs: the name of a shipped profile, or a file."""
    truth: str = "1.5"
    """True slow-down of sharing: a number, a CSV matrix, or the name of a shipped table."""
    belief: str | None = None
    """Slow-down that the policy believes. None: the true one. "learned": it starts from the profile and learns from
    what jobs report. "learned:probe=1.5": it also tries families that it has not seen share. "unknown": it starts from
    a guess of each job's duration and has neither a profile nor measured pairs. "unknown:unique": in addition, no two
    jobs are alike, so that nothing carries over."""
    duration_error: float = 0.0
    """Sigma of the lognormal error of believed iteration times."""
    interference_error: float = 0.0
    """Sigma of the lognormal error of believed slow-downs."""
    report_error: float = 0.0
    """Sigma of the lognormal error of the iteration times that jobs report."""
    report_s: float | None = None
    """Seconds at a new pace after which a job reports its speed; None: 2 with the belief "unknown", otherwise 0; inf:
    jobs never report."""
    guesses: tuple[tuple[str, float], ...] = ()
    """Users whose guesses of durations are wrong, each with the ratio of guess to truth."""
    trust_guesses: bool = False
    """Whether guesses count as they are; otherwise they are corrected (`core.healing`)."""
    seed: int = 1
    """Seed of these errors."""
    jobs_per_gpu: int = 2
    """Number of jobs that may compute on a GPU at the same time."""
    resident_per_gpu: int = RESIDENT_PER_GPU
    """Number of jobs, active and paused ones, that may hold memory on a GPU."""
    can_swap: bool = False
    """Whether the memory of a paused job of one GPU can be moved to main memory."""
    gpu_memory: int | None = None
    """Bytes on each GPU; None for the memory of the profile's GPU."""
    memory_limit: bool = True
    ignore_placement: bool = False
    """Whether every placement is as fast as the most consolidated one."""
    costs: Costs = NO_COSTS
    fair_share: float = 0.0
    """How strongly groups and users that used less than their share go first: 0 not at all, 1 above all."""
    half_life_s: float = FairShare().half_life_s
    """Seconds after which a GPU-second that was used counts half."""
    groups: tuple[UserGroup, ...] = ()
    """The groups that have a weight, a guarantee or a cap of their own."""
    closures: tuple[Closure, ...] = ()
    """The GPUs that are drained or reserved for a time."""
    fairness: bool = False
    """Whether finish-time fairness is measured. It takes one more simulation for each tenant."""
    large_above: int = 4
    """Number of GPUs above which a job counts as large."""


@dataclass(frozen=True)
class Result:
    """The result of one simulation."""

    summary: Summary
    state: State
    """The world at the end; `ended` holds each job's record."""

    @property
    def jobs(self) -> list[JobRecord]:
        """The finished jobs, in the order of their end."""
        return finished(self.state)

    def usage(self, by: Sequence[str]) -> UsageReport:
        """Return what jobs used of the GPUs, from time 0 to the last end; needs `accounts`."""
        return report_usage(self.state, by, self.state.now)


def simulate(
    workload: Workload | Iterable[Job],
    policy: str | Policy = "sjf-bsbf",
    setup: Setup | None = None,
    *,
    log: Callable[[ev.Event], None] | None = None,
    accounts: bool = False,
) -> Result:
    """Simulate a workload under a policy until all jobs have ended. `log` is called with every event, in order.

    `accounts`: count what jobs use of the GPUs, for `Result.usage`.
    """
    began = process_time()
    setup = setup or Setup()
    if not isinstance(workload, Workload):
        workload = Workload(tuple(sorted(workload, key=lambda job: job.submitted)))
        check_ids(workload)
        check_dependencies(workload)
    name = policy if isinstance(policy, str) else str(getattr(policy, "name", type(policy).__name__))
    chosen = policies.make(policy) if isinstance(policy, str) else policy
    nodes = cluster_nodes(setup)
    belief, truth = _models(setup, max(len(node.gpus) for node in nodes), workload)
    unknown = (setup.belief or "").partition(":")[0] == UNKNOWN
    report_s = setup.report_s if setup.report_s is not None else REPORT_S * unknown
    with no_garbage_collection():
        try:
            engine = Engine(
                map(make_unique, workload.jobs) if setup.belief == UNIQUE else workload.jobs,
                nodes,
                chosen,
                belief=belief,
                truth=truth,
                jobs_per_gpu=setup.jobs_per_gpu,
                resident_per_gpu=setup.resident_per_gpu,
                costs=setup.costs,
                report_error=(setup.report_error, setup.seed),
                report_s=report_s,
                settings=[*([ev.AccountsOpened(0.0, exact=True)] if accounts else []), *tenant_settings(setup)],
                guess=as_guessed(setup, truth, workload) if setup.guesses else None,
                log=log,
            )
            state = engine.run()
        except CannotFinish as error:
            where = workload.where(error.job) if error.job else workload.source
            field = str(error).partition(":")[0]
            raise InputError(f"{where}: {error}{REMEDIES.get(field, '')}") from None
        except IllegalPlan as illegal:
            if not isinstance(policy, str):
                raise
            raise InputError(f"policy {name}: {illegal}; fix its decide()") from illegal
        except (Exception, SystemExit) as error:
            if not isinstance(policy, str) or not comes_from(chosen, error):
                raise
            raise InputError(f"policy {name} failed: {failure_text(chosen, error)}; fix it") from None
        summary = summarise(
            state,
            policy=name,
            workload=workload.source,
            decisions=engine.scheduler.policy_calls,
            decision_cpu_s=engine.decision_cpu_s,
            cpu_s=process_time() - began,
            large_above=setup.large_above,
            trials=engine.belief.trials,
        )
        if setup.guesses:
            summary = replace(summary, corrected=corrected_users(engine.belief.guesses))
        if setup.fairness:
            alone = own_jcts(workload.jobs, setup)
            summary = replace(summary, fairness=measure(finished(state), alone, tenant_weights(setup)))
    return Result(summary, state)


def tenant_settings(setup: Setup) -> list[ev.Event]:
    """Return the events that say how the cluster is divided, if it is, what is closed, and whether guesses count."""
    found: list[ev.Event] = [ev.GroupChanged(0.0, group) for group in setup.groups]
    if setup.fair_share:
        found.append(ev.FairShareChanged(0.0, FairShare(setup.fair_share, setup.half_life_s)))
    if setup.trust_guesses:
        found.append(ev.GuessesTrusted(0.0))
    found += [ev.ClosureSet(0.0, closure) for closure in setup.closures]
    return found


def as_guessed(setup: Setup, truth: PerformanceModel, workload: Workload) -> Callable[[Job], Job]:
    """Return what makes jobs as long as their users guess them to be."""
    factors = dict(setup.guesses)
    users = {job.user for job in workload.jobs}
    for user in factors.keys() - users:
        known = ", ".join(sorted(filter(None, users))[:5]) or "none; give the jobs a column user"
        raise InputError(f"--guess {user}: no job of {workload.source} belongs to this user; users are {known}")

    def guessed(job: Job) -> Job:
        factor = factors.get(job.user)
        if factor is None:
            return job
        alone_s = job.iterations * truth.iteration_time(job, 1, Placement(job.gpus, truth.fewest_nodes(job.gpus)))
        return replace(job, duration_s=factor * alone_s)

    return guessed


def parse_cluster(text: str, place: str = "cluster") -> tuple[int, int]:
    """Return nodes and GPUs per node of a text such as `16x4`. `place` is the field or option that an error names."""
    remedy = "write nodes x GPUs per node, for example 16x4"
    match = re.fullmatch(r"(\d{1,7})[x×](\d{1,7})", text.strip())
    number, size = (int(part) for part in match.groups()) if match else (0, 0)
    if match and number * size == 0:
        raise InputError(f"{place} {text!r}: needs at least one node and one GPU; {remedy}")
    if not 1 <= number * size <= 1_000_000:
        raise InputError(f"{place} {text!r}: {remedy}")
    return number, size


def node_sizes(text: str, place: str = "cluster") -> list[int]:
    """Return the GPUs of each node of a text such as `16x4`, or `4x8+2x4` for nodes of several sizes."""
    groups = [parse_cluster(group, place) for group in text.split("+")]
    if sum(number * size for number, size in groups) > 1_000_000:
        raise InputError(f"{place} {text!r}: has more than a million GPUs; write a smaller one")
    return [size for number, size in groups for _ in range(number)]


def cluster_nodes(setup: Setup) -> list[Node]:
    """Return the nodes of the setup's cluster."""
    sizes = node_sizes(setup.cluster)
    gpu = _profile(setup.profile).gpu
    memory = setup.gpu_memory or (gpu.memory_bytes if gpu else None)
    if memory is None:
        if setup.memory_limit:
            raise InputError(f"profile {setup.profile} does not say how much memory a GPU has; give --gpu-memory")
        memory = 0
    ends = list(accumulate(sizes))
    return [
        Node(f"node{n}", tuple(range(end - size, end)), memory, setup.can_swap)
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def true_model(workload: Workload, setup: Setup) -> PerformanceModel:
    """Return the model of how fast these jobs really are in this world."""
    return _models(setup, max(node_sizes(setup.cluster)), workload)[1]


def _models(setup: Setup, node_gpus: int, workload: Workload) -> tuple[PerformanceModel, PerformanceModel]:
    """Return the believed and the true performance model; one object where they are the same."""
    tasks = _profile(setup.profile).core_tasks()
    for job in workload.jobs:
        if job.model not in tasks and (job.model != GENERIC or job.duration_s is None):
            if job.model == GENERIC:
                problem = f"duration_s: a job of model {GENERIC} needs one; give the seconds it runs alone"
            else:
                problem = f"model: {job.model!r} is not in profile {setup.profile}: {nearest(job.model, tasks)}"
                problem += f" (or {GENERIC}, with a duration_s)"
            raise InputError(f"{workload.where(job.id)}: {problem}")

    def model(interference: str, error: float = 0.0) -> FittedModel:
        table = _table(interference, setup, workload)
        return FittedModel(
            tasks,
            MisestimatedSlowdowns(table, error, setup.seed) if error else table,
            node_gpus,
            ignore_placement=setup.ignore_placement,
            ignore_memory=not setup.memory_limit,
            startup=setup.costs.launch,
        )

    truth = model(setup.truth)
    name = setup.belief or setup.truth
    if name.partition(":")[0] == UNKNOWN:
        return _strangers(setup, truth, node_gpus)
    if name.partition(":")[0] == LEARNED:
        return _learner(setup, model(setup.truth)), truth
    # with report errors, belief and truth are two models even if they agree, because reports change the belief
    same = name == setup.truth and not (setup.report_error or setup.interference_error or setup.guesses)
    belief: PerformanceModel = truth if same else model(name, setup.interference_error)
    if setup.duration_error:
        belief = MisestimatedTimes(belief, setup.duration_error, setup.seed)
    return belief, truth


def _strangers(setup: Setup, truth: FittedModel, node_gpus: int) -> tuple[PerformanceModel, PerformanceModel]:
    """Return the belief of a scheduler that has measured no job, and the truth."""
    if setup.belief not in (UNKNOWN, UNIQUE):
        raise InputError(f"belief {setup.belief!r}: write {UNKNOWN}, or {UNIQUE} where no two jobs are alike")
    world: PerformanceModel = RealModels(truth) if setup.belief == UNIQUE else truth
    guess = MisestimatedTimes(world, setup.duration_error, setup.seed) if setup.duration_error else world
    return UnknownBelief(guess, node_gpus, _profile(setup.profile), _mechanism(setup)), world


def _mechanism(setup: Setup) -> str:
    """Return the sharing mechanism that the true table was measured under, where its name says so."""
    return next((part for part in setup.truth.split(":") if part in KAPPA), "unknown")


def _learner(setup: Setup, fitted: FittedModel) -> Belief:
    """Return a belief that follows from the profile and the sharing mechanism, without the true slow-downs."""
    probe = None
    _, colon, option = (setup.belief or "").partition(":")
    if colon:
        key, _, value = option.partition("=")
        if key != "probe" or not re.fullmatch(r"\d{1,3}(\.\d{1,9})?", value) or float(value) < 1.0:
            raise InputError(
                f"belief {setup.belief!r}: write {LEARNED}, or {LEARNED}:probe=1.5 with a slow-down of at least 1"
            )
        probe = float(value)
    times = MisestimatedTimes(fitted, setup.duration_error, setup.seed) if setup.duration_error else None
    return believe(_profile(setup.profile), fitted, _mechanism(setup), times=times, with_pairs=False, probe=probe)


def _table(text: str, setup: Setup, workload: Workload) -> Interference:
    """Return the interference that `text` names, after checking that it covers all pairs of models in the workload."""
    table = read_interference(text)
    if isinstance(table, TableInterference):
        xis = [cell.xi for cells in table.cells.values() for cell in cells]
    else:
        xis = [table.xi] if isinstance(table, ConstantInterference) else []
    if max(xis, default=1.0) > MOST_SLOWDOWN:
        raise InputError(f"interference {text}: {max(xis):g} is too large; give a slow-down of at most {MOST_SLOWDOWN}")
    if isinstance(table, TableInterference) and setup.jobs_per_gpu > 1:
        first = {job.model: job for job in reversed(workload.jobs)}
        for model, mate in product(sorted(first), repeat=2):
            if (model, mate) not in table.cells:
                beside = "" if model not in table.models else f" beside {mate!r}"
                problem = f"model: interference {text} has no entry for {model!r}{beside}; it has "
                problem += f"{', '.join(sorted(table.models))}; add the pair or give a number such as 1.5"
                raise InputError(f"{workload.where(first[model].id)}: {problem}")
    return table


@lru_cache(maxsize=8)
def _profile(name: str) -> Profile:
    return load(name)


@contextmanager
def no_garbage_collection(*, ever: bool = True) -> Iterator[None]:
    """Disable garbage collection: a run makes hardly any reference cycles, and the search costs a tenth of its time.

    `ever`: whether what was made meanwhile is searched afterwards; it need not be where the process is about to end.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not ever:
                gc.freeze()
            gc.enable()
