"""What `carpool profile` measures, in the order of its worth, so that a budget that ends early costs the least.

A phase is one mechanism and one batch of every task; its processes are started once. Within a phase: every job alone,
then all pairs, other accumulations, groups of three and four, and at last some of it again, which tells how well
measurements repeat. Pairs of different batches come last, in phases of their own. `session.py` carries it out.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement, product

from carpool.profile.measure.raw import Setting, Wish

MPS, TIME_SLICING = "mps", "time-slicing"
SEED = 0
"""Groups and repetitions are drawn by it, always the same ones, so that a resumed call goes on with the same plan."""


@dataclass(frozen=True, slots=True)
class Source:
    """A task and how to start it. Its i-th batch is measured beside the i-th batch of the others."""

    task: str
    command: tuple[str, ...]
    batch_option: str | None
    batches: tuple[int, ...]
    mate_only: bool = False
    """It is there for others to be measured beside; pairs of two such tasks are left out."""

    def start(self, batch: int) -> tuple[str, ...]:
        return (*self.command, self.batch_option, str(batch)) if self.batch_option and batch else self.command

    def batch_advice(self) -> str:
        """What to do if the script ran at another batch."""
        if self.batch_option is None:
            return "its batches differ, so give --batch and --batch-option"
        return f"is {self.batch_option} what its batch depends on, and does it count samples?"

    def at(self, index: int) -> Setting:
        """The batch of a phase; a task with fewer batches stays at its last."""
        return Setting(self.task, self.batches[min(index, len(self.batches) - 1)])


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is asked for."""

    mechanisms: tuple[str, ...] = (MPS, TIME_SLICING)
    accumulations: tuple[int, ...] = (2, 4)
    pairs: bool = True
    across: bool = True
    """Also pairs of different batches: what a small job suffers beside a large one, no pair of small ones tells."""
    groups: int = 0
    """Groups of three and as many of four, for each phase under MPS."""
    repeats: int = 3
    """Pairs measured again in each phase, and every job alone once more; 0: nothing is repeated."""
    alone: tuple[Setting, ...] = ()
    """More batches to measure alone, under the first mechanism."""


@dataclass(frozen=True, slots=True)
class Phase:
    mechanism: str
    wishes: tuple[Wish, ...]

    def copies(self) -> dict[Setting, int]:
        """How many processes of each task and batch are needed at once."""
        needed: dict[Setting, int] = {}
        for wish in self.wishes:
            plain = [Setting(s.task, s.batch) for s in wish.settings]
            for setting in plain:
                needed[setting] = max(needed.get(setting, 0), plain.count(setting))
        return needed


def plan(sources: Sequence[Source], scope: Scope) -> list[Phase]:
    """All phases: the first batches under every mechanism, then the next ones."""
    sets = max(len(source.batches) for source in sources)
    phases = []
    for index in range(sets):
        for mechanism in scope.mechanisms:
            sweep = scope.accumulations if mechanism == scope.mechanisms[0] else ()
            phases.append(Phase(mechanism, tuple(_phase(sources, index, mechanism, scope, sweep))))
    if scope.alone:
        first = scope.mechanisms[0]
        runs = range(2 if scope.repeats else 1)
        phases.append(Phase(first, tuple(Wish(first, (one,), run) for run in runs for one in scope.alone)))
    if scope.pairs and scope.across and (pairs := _pairs_across(sources, sets)):
        phases += [Phase(mechanism, tuple(_across(pairs, mechanism, scope))) for mechanism in scope.mechanisms]
    return list(_without_repetition(phases))


def _without_repetition(phases: Sequence[Phase]) -> Iterator[Phase]:
    """What is wished for in several phases, as by a task with fewer batches, is left to the first."""
    before: set[Wish] = set()
    for phase in phases:
        wishes = tuple(wish for wish in dict.fromkeys(phase.wishes) if wish not in before)
        before |= {*wishes}
        if wishes:
            yield replace(phase, wishes=wishes)


def _phase(sources: Sequence[Source], index: int, mechanism: str, scope: Scope, sweep: Sequence[int]) -> Iterator[Wish]:
    settings = [source.at(index) for source in sources]
    for setting in settings:
        yield Wish(mechanism, (setting,))
    pairs = list(_pairs(sources, settings)) if scope.pairs else []
    for pair in pairs:
        yield Wish(mechanism, pair)
    for setting in settings:
        for accumulation in sweep:
            if 1 < accumulation <= setting.batch:
                yield Wish(mechanism, (Setting(setting.task, setting.batch, accumulation),))
    drawn = random.Random(SEED)
    if mechanism == MPS:
        for group in _groups(settings, scope.groups, drawn):
            yield Wish(mechanism, group)
    if scope.repeats:
        for setting in settings:
            yield Wish(mechanism, (setting,), run=1)
        for pair in drawn.sample(pairs, min(scope.repeats, len(pairs))):
            yield Wish(mechanism, pair, run=1)


def _pairs(sources: Sequence[Source], settings: Sequence[Setting]) -> Iterator[tuple[Setting, Setting]]:
    for (one, a), (other, b) in combinations_with_replacement(list(zip(sources, settings, strict=True)), 2):
        if not (one.mate_only and other.mate_only):
            yield a, b


def _pairs_across(sources: Sequence[Source], sets: int) -> list[tuple[Setting, Setting]]:
    known = {frozenset(pair) for i in range(sets) for pair in _pairs(sources, [source.at(i) for source in sources])}
    found: dict[frozenset[Setting], tuple[Setting, Setting]] = {}
    for i, j in combinations(range(sets), 2):
        for one, other in product(sources, repeat=2):
            pair = one.at(i), other.at(j)
            if frozenset(pair) not in known and not (one.mate_only and other.mate_only):
                found.setdefault(frozenset(pair), pair)
    return list(found.values())


def _across(pairs: Sequence[tuple[Setting, Setting]], mechanism: str, scope: Scope) -> Iterator[Wish]:
    """Every job alone once more before and after, for its speed may have changed since."""
    settings = sorted({setting for pair in pairs for setting in pair}) if scope.repeats else []
    for setting in settings:
        yield Wish(mechanism, (setting,), run=2)
    for pair in pairs:
        yield Wish(mechanism, pair)
    for setting in settings:
        yield Wish(mechanism, (setting,), run=3)
    for pair in random.Random(SEED).sample(pairs, min(scope.repeats, len(pairs))):
        yield Wish(mechanism, pair, run=1)


def _groups(settings: Sequence[Setting], count: int, drawn: random.Random) -> Iterator[tuple[Setting, ...]]:
    """Groups of three and four by turns; few tasks give groups with two copies of one."""
    kinds = []
    for size in (3, 4):
        many = list(combinations(settings, size)) or [
            group for group in combinations_with_replacement(settings, size) if max(map(group.count, group)) <= 2
        ]
        kinds.append(drawn.sample(many, min(count, len(many))))
    for three, four in zip(*(kind + [None] * (count - len(kind)) for kind in kinds), strict=True):
        yield from (group for group in (three, four) if group is not None)
