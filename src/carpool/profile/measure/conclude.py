"""Makes a profile of raw measurements: eq. 3–7, the memory line, slow-downs with intervals, and what predicts them.

`carpool profile` calls it at its end, and again whenever its raw file has grown. An interval is where a repetition of
the same measurement is to be expected, 19 times of 20: from the spread within the windows and, mostly, from how much
repeated measurements of this very session differ.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from carpool.core.model import sub_batch
from carpool.core.perf import Placement
from carpool.profile.demand import fit_demands
from carpool.profile.fields import ProfileError
from carpool.profile.fit import fit_task, memory_line, significant
from carpool.profile.measure.predict import fit_busy, fit_kappa
from carpool.profile.measure.raw import Machine, Measurement, Setting
from carpool.profile.rows import GIB, Run
from carpool.profile.values import Gpu, Group, GroupJob, Kappa, Memory, Pair, Profile, TaskProfile

GUESSED_CONTEXT = round(0.7 * GIB)
NORMAL = 1.96
PRIOR_WEIGHT = 2
"""How many repetitions of its own a task needs to weigh as much as all tasks together when its noise is estimated."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What a person says about the profile."""

    name: str
    description: str = ""
    batch_norm: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def conclude(machine: Machine, measurements: Sequence[Measurement], naming: Naming) -> Profile:
    if not measurements:
        raise ProfileError("nothing was measured; give more --minutes")
    mechanism = richest(measurements)
    runs = solo_runs(measurements, mechanism)
    tasks = {}
    for name in sorted({run.task for run in runs}):
        own = [run for run in runs if run.task == name]
        norm = name in naming.batch_norm if naming.batch_norm else None
        tasks[name] = replace(_task(own, _contexts(measurements, name)), batch_norm=norm)
    noise = Noise(measurements)
    pairs = [pair for done in _sharing(measurements, 2) if (pair := pair_of(done, noise))]
    merged = [pair.rounded(3) for pair in merge(pairs, noise)]
    tasks, kappa = _predictors(tasks, merged, runs)
    return Profile(
        name=naming.name,
        description=naming.description,
        gpu=Gpu(machine.gpu, machine.memory_bytes, machine.driver, 1),
        mechanisms={m: MECHANISM_NOTES[m] for m in sorted({done.wish.mechanism for done in measurements})},
        noise=noise.told(),
        notes=(
            *naming.notes,
            f"Iteration times are those under {mechanism}.",
            "All measurements are of one GPU: the communication constants are unknown and stand at 0.",
        ),
        tasks=tasks,
        pairs=tuple(merged),
        groups=tuple(group for done in _sharing(measurements, 3) if (group := _group(done, noise))),
        kappa=kappa,
        measured=f"{machine.date}, {machine.software}",
        raw=tuple(measurements),
    )


MECHANISM_NOTES = {
    "mps": "one MPS control daemon, no cap on threads, every process verified as its client",
    "time-slicing": "no MPS daemon: contexts take turns",
    "unknown": "not recorded",
}


def richest(measurements: Iterable[Measurement]) -> str:
    """The mechanism under which most settings ran alone. Times of several are not mixed: they may differ."""
    alone = {(done.wish.mechanism, done.samples[0].setting) for done in measurements if len(done.samples) == 1}
    names = sorted(mechanism for mechanism, _ in alone) or ["unknown"]
    return max(dict.fromkeys(names), key=names.count)


def solo_runs(measurements: Iterable[Measurement], mechanism: str) -> list[Run]:
    """One row for each setting that ran alone under a mechanism: the mean over its repetitions."""
    alone: dict[Setting, list[Measurement]] = {}
    for done in measurements:
        if len(done.samples) == 1 and done.wish.mechanism == mechanism:
            alone.setdefault(done.samples[0].setting, []).append(done)
    rows = []
    for setting, same in alone.items():
        peaks = [done.samples[0].peak_bytes for done in same]
        rows.append(
            Run(
                *(setting.task, setting.batch, setting.accum, 1, 1),
                seconds=mean(done.samples[0].iter_s for done in same),
                memory_bytes=max((peak for peak in peaks if peak is not None), default=None),
            )
        )
    return rows


def _contexts(measurements: Iterable[Measurement], task: str) -> list[int]:
    samples = (sample for done in measurements for sample in done.samples if sample.setting.task == task)
    return [sample.context_bytes for sample in samples if sample.context_bytes is not None]


def _task(runs: Sequence[Run], contexts: Sequence[int]) -> TaskProfile:
    fitted = fit_task(runs, bend=True)
    error = fitted.error
    assert error is not None
    held, points = hold_out(runs)
    if held is not None:
        error = replace(error, held_out_median=significant(held, 4), held_out_points=points)
    return replace(
        fitted, error=error, memory=_memory(runs, contexts), busy=fit_busy(runs), source="measured by carpool profile"
    )


def hold_out(runs: Sequence[Run]) -> tuple[float | None, int]:
    """The median error of settings that the fit has not seen: each in turn is left out, but smallest and largest."""
    sizes = sorted({run.batch / run.accum for run in runs})
    errors = []
    for unseen in runs:
        seen = [run for run in runs if run is not unseen]
        inside = sizes[0] < unseen.batch / unseen.accum < sizes[-1]
        if inside and len({run.batch / run.accum for run in seen}) >= 2:
            predicted = fit_task(seen, bend=True).core().iteration(unseen.batch, unseen.accum, Placement(1, 1))
            errors.append(abs(predicted / unseen.seconds - 1))
    return (median(errors), len(errors)) if errors else (None, 0)


def _memory(runs: Sequence[Run], contexts: Sequence[int]) -> Memory | None:
    told = [run for run in runs if run.memory_bytes is not None]
    if len({sub_batch(run.batch, run.accum) for run in told}) < 2:
        return None
    context = round(median(contexts)) if contexts else GUESSED_CONTEXT
    memory = memory_line(told, 1.0, context)
    origin = "measured as the driver's figure less the allocator's" if contexts else "not told by the driver, a guess"
    return replace(memory, source=f"{memory.source}; the context was {origin}")


class Noise:
    """How much the same measurement differs from run to run, by mechanism and task, in log(seconds)."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._solo: dict[tuple[str, Setting], list[float]] = {}
        self._window: dict[tuple[str, Setting], float] = {}
        self._spread: dict[tuple[str, str], list[float]] = {}
        same: dict[tuple[str, tuple[Setting, ...]], list[Measurement]] = {}
        for done in measurements:
            same.setdefault((done.wish.mechanism, done.wish.settings), []).append(done)
            if len(done.samples) == 1:
                (sample,) = done.samples
                self._solo.setdefault((done.wish.mechanism, sample.setting), []).append(sample.iter_s)
                self._window[done.wish.mechanism, sample.setting] = sample.error
        for (mechanism, settings), repeated in same.items():
            for at, setting in enumerate(settings):
                logs = [math.log(done.samples[at].iter_s) for done in repeated]
                if len(logs) > 1:
                    variance = sum((x - mean(logs)) ** 2 for x in logs) / (len(logs) - 1)
                    self._spread.setdefault((mechanism, setting.task), []).append(variance)

    def alone(self, mechanism: str, setting: Setting) -> float | None:
        times = self._solo.get((mechanism, setting))
        return mean(times) if times else None

    def sigma(self, mechanism: str, task: str) -> float:
        """A task's own spread, drawn towards that of all tasks where it was seldom repeated; 0 if nothing was."""
        everybody = [v for (m, _), values in self._spread.items() if m == mechanism for v in values]
        if not everybody:
            return 0.0
        own = self._spread.get((mechanism, task), [])
        return math.sqrt((sum(own) + PRIOR_WEIGHT * mean(everybody)) / (len(own) + PRIOR_WEIGHT))

    def half_width(self, mechanism: str, setting: Setting, error: float, runs: int) -> float:
        """Of log ξ: a repetition against the mean of `runs`, each relative to the job alone."""
        alone_runs = len(self._solo.get((mechanism, setting), ())) or 1
        between = NORMAL * self.sigma(mechanism, setting.task)
        within = self._window.get((mechanism, setting), 0.0)
        return math.sqrt(between**2 * (1 + 1 / runs + 1 / alone_runs) + error**2 + within**2)

    def told(self) -> str:
        if not self._spread:
            return "Nothing was measured twice: the intervals are those of single windows."
        parts = []
        for mechanism in sorted({m for m, _ in self._spread}):
            every = sorted(
                math.sqrt(2 * v) for (m, _), values in self._spread.items() if m == mechanism for v in values
            )
            parts.append(
                f"under {mechanism} the same measurement made twice differs by {100 * median(every):.1f} % in the "
                f"median and by up to {100 * every[-1]:.0f} % ({len(every)} repeated)"
            )
        text = "; ".join(parts)
        return (
            f"{text[0].upper()}{text[1:]}. Intervals are where 95 % of repetitions are expected; ξ below 1 counts as 1."
        )


def _sharing(measurements: Iterable[Measurement], at_least: int) -> list[Measurement]:
    if at_least == 2:
        return [done for done in measurements if len(done.samples) == 2]
    return [done for done in measurements if len(done.samples) >= at_least]


def _slowdowns(done: Measurement, noise: Noise) -> list[float] | None:
    alone = [noise.alone(done.wish.mechanism, sample.setting) for sample in done.samples]
    if None in alone:
        return None
    return [sample.iter_s / time for sample, time in zip(done.samples, alone, strict=True) if time is not None]


def pair_of(done: Measurement, noise: Noise) -> tuple[Pair, tuple[float, float]] | None:
    xi = _slowdowns(done, noise)
    if xi is None:
        return None
    a, b = done.samples
    pair = Pair(a.setting.task, a.setting.batch, b.setting.task, b.setting.batch, done.wish.mechanism, xi[0], xi[1])
    return pair, (a.error, b.error)


def merge(measured: Sequence[tuple[Pair, tuple[float, float]]], noise: Noise) -> list[Pair]:
    """One pair for all its repetitions: the mean, and the interval of a further one."""
    runs: dict[tuple[object, ...], list[tuple[Pair, tuple[float, float]]]] = {}
    for pair, errors in measured:
        runs.setdefault((pair.mechanism, pair.a, pair.batch_a, pair.b, pair.batch_b), []).append((pair, errors))
    merged = []
    for same in runs.values():
        first, count = same[0][0], len(same)
        ends = []
        xis = [mean(pair.xi_a for pair, _ in same), mean(pair.xi_b for pair, _ in same)]
        for which, (task, batch) in enumerate(((first.a, first.batch_a), (first.b, first.batch_b))):
            error = max(errors[which] for _, errors in same)
            half = noise.half_width(first.mechanism, Setting(task, batch), error, count)
            ends.append((xis[which] * math.exp(-half), xis[which] * math.exp(half)))
        merged.append(replace(first, xi_a=xis[0], xi_b=xis[1], interval_a=ends[0], interval_b=ends[1], runs=count))
    return merged


def _group(done: Measurement, noise: Noise) -> Group | None:
    xi = _slowdowns(done, noise)
    if xi is None:
        return None
    jobs = tuple(GroupJob(sample.setting.task, sample.setting.batch) for sample in done.samples)
    return Group(jobs, done.wish.mechanism, tuple(round(x, 3) for x in xi))


def _predictors(
    tasks: dict[str, TaskProfile], pairs: Sequence[Pair], runs: Sequence[Run]
) -> tuple[dict[str, TaskProfile], dict[str, Kappa]]:
    busy = {name: task.busy for name, task in tasks.items() if task.busy is not None}
    kappas = {}
    for mechanism in sorted({pair.mechanism for pair in pairs}):
        own = [pair for pair in pairs if pair.mechanism == mechanism]
        kappas[mechanism] = fit_kappa(own, busy)
        for name, demands in fit_demands(own, runs).items():
            tasks[name] = replace(tasks[name], demands=(*tasks[name].demands, *demands))
    return tasks, {mechanism: kappa for mechanism, kappa in kappas.items() if kappa is not None}
