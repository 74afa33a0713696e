"""The plan of `carpool profile`: what to measure, most important first, in case the budget is short.

A phase is one mechanism and one batch of every task; its processes are started once. Within a phase every job runs
alone, then all pairs, other accumulations, groups of three and four, and finally some of it again, which shows how well
measurements repeat. Pairs of different batches come last, in phases of their own. `session.py` runs the plan.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement, product

from carpool.profile.measure.raw import MeasurementRequest, Setting

MPS, TIME_SLICING = "mps", "time-slicing"
SEED = 0
"""Seed for groups and repetitions. It is fixed, so that a resumed call continues the same plan."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A task and how to start it. Its i-th batch is measured beside the i-th batch of the others."""

    task: str
    command: tuple[str, ...]
    batch_option: str | None
    batches: tuple[int, ...]
    mate_only: bool = False
    """Whether the task is only measured beside others. Pairs of two such tasks are left out."""

    def start(self, batch: int) -> tuple[str, ...]:
        return (*self.command, self.batch_option, str(batch)) if self.batch_option and batch else self.command

    def batch_advice(self) -> str:
        """Return what to do if the script ran at another batch."""
        if self.batch_option is None:
            return "its batches differ, so give --batch and --batch-option"
        return f"is {self.batch_option} what its batch depends on, and does it count samples?"

    def at(self, index: int) -> Setting:
        """Return the batch of a phase. A task with fewer batches stays at its last one."""
        return Setting(self.task, self.batches[min(index, len(self.batches) - 1)])


@dataclass(frozen=True, slots=True)
class Scope:
    """The amount of measurements requested."""

    mechanisms: tuple[str, ...] = (MPS, TIME_SLICING)
    accumulations: tuple[int, ...] = (2, 4)
    pairs: bool = True
    across: bool = True
    """Whether to measure pairs of different batches: pairs of equal batches do not predict them."""
    groups: int = 0
    """Number of groups of three, and of groups of four, in each phase under MPS."""
    repeats: int = 3
    """Number of pairs measured again in each phase, with every job alone once more. 0: no repetitions."""
    alone: tuple[Setting, ...] = ()
    """Further batches to measure alone, under the first mechanism."""


@dataclass(frozen=True, slots=True)
class MeasurementPhase:
    mechanism: str
    requests: tuple[MeasurementRequest, ...]

    def copies(self) -> dict[Setting, int]:
        """Return how many processes of each task and batch are needed at once."""
        needed: dict[Setting, int] = {}
        for request in self.requests:
            plain = [Setting(s.task, s.batch) for s in request.settings]
            for setting in plain:
                needed[setting] = max(needed.get(setting, 0), plain.count(setting))
        return needed


def plan(sources: Sequence[TaskSource], scope: Scope) -> list[MeasurementPhase]:
    """Return all phases: the first batches under every mechanism, then the next ones."""
    sets = max(len(source.batches) for source in sources)
    phases = []
    for index in range(sets):
        for mechanism in scope.mechanisms:
            sweep = scope.accumulations if mechanism == scope.mechanisms[0] else ()
            phases.append(MeasurementPhase(mechanism, tuple(_phase(sources, index, mechanism, scope, sweep))))
    if scope.alone:
        first = scope.mechanisms[0]
        runs = range(2 if scope.repeats else 1)
        phases.append(
            MeasurementPhase(
                first, tuple(MeasurementRequest(first, (one,), run) for run in runs for one in scope.alone)
            )
        )
    if scope.pairs and scope.across and (pairs := _pairs_across(sources, sets)):
        phases += [
            MeasurementPhase(mechanism, tuple(_across(pairs, mechanism, scope))) for mechanism in scope.mechanisms
        ]
    return list(_without_repetition(phases))


def _without_repetition(phases: Sequence[MeasurementPhase]) -> Iterator[MeasurementPhase]:
    """Remove requests that an earlier phase has already, such as those of a task with fewer batches."""
    before: set[MeasurementRequest] = set()
    for phase in phases:
        requests = tuple(request for request in dict.fromkeys(phase.requests) if request not in before)
        before |= {*requests}
        if requests:
            yield replace(phase, requests=requests)


def _phase(
    sources: Sequence[TaskSource], index: int, mechanism: str, scope: Scope, sweep: Sequence[int]
) -> Iterator[MeasurementRequest]:
    settings = [source.at(index) for source in sources]
    for setting in settings:
        yield MeasurementRequest(mechanism, (setting,))
    pairs = list(_pairs(sources, settings)) if scope.pairs else []
    for pair in pairs:
        yield MeasurementRequest(mechanism, pair)
    for setting in settings:
        for accumulation in sweep:
            if 1 < accumulation <= setting.batch:
                yield MeasurementRequest(mechanism, (Setting(setting.task, setting.batch, accumulation),))
    drawn = random.Random(SEED)
    if mechanism == MPS:
        for group in _groups(settings, scope.groups, drawn):
            yield MeasurementRequest(mechanism, group)
    if scope.repeats:
        for setting in settings:
            yield MeasurementRequest(mechanism, (setting,), run=1)
        for pair in drawn.sample(pairs, min(scope.repeats, len(pairs))):
            yield MeasurementRequest(mechanism, pair, run=1)


def _pairs(sources: Sequence[TaskSource], settings: Sequence[Setting]) -> Iterator[tuple[Setting, Setting]]:
    for (one, a), (other, b) in combinations_with_replacement(list(zip(sources, settings, strict=True)), 2):
        if not (one.mate_only and other.mate_only):
            yield a, b


def _pairs_across(sources: Sequence[TaskSource], sets: int) -> list[tuple[Setting, Setting]]:
    known = {frozenset(pair) for i in range(sets) for pair in _pairs(sources, [source.at(i) for source in sources])}
    found: dict[frozenset[Setting], tuple[Setting, Setting]] = {}
    for i, j in combinations(range(sets), 2):
        for one, other in product(sources, repeat=2):
            pair = one.at(i), other.at(j)
            if frozenset(pair) not in known and not (one.mate_only and other.mate_only):
                found.setdefault(frozenset(pair), pair)
    return list(found.values())


def _across(pairs: Sequence[tuple[Setting, Setting]], mechanism: str, scope: Scope) -> Iterator[MeasurementRequest]:
    """Yield pairs of different batches, with every job alone before and after, as its speed may have changed."""
    settings = sorted({setting for pair in pairs for setting in pair}) if scope.repeats else []
    for setting in settings:
        yield MeasurementRequest(mechanism, (setting,), run=2)
    for pair in pairs:
        yield MeasurementRequest(mechanism, pair)
    for setting in settings:
        yield MeasurementRequest(mechanism, (setting,), run=3)
    for pair in random.Random(SEED).sample(pairs, min(scope.repeats, len(pairs))):
        yield MeasurementRequest(mechanism, pair, run=1)


def _groups(settings: Sequence[Setting], count: int, drawn: random.Random) -> Iterator[tuple[Setting, ...]]:
    """Yield groups of three and four alternately. With few tasks a group has two copies of one task."""
    kinds = []
    for size in (3, 4):
        many = list(combinations(settings, size)) or [
            group for group in combinations_with_replacement(settings, size) if max(map(group.count, group)) <= 2
        ]
        kinds.append(drawn.sample(many, min(count, len(many))))
    for three, four in zip(*(kind + [None] * (count - len(kind)) for kind in kinds), strict=True):
        yield from (group for group in (three, four) if group is not None)
