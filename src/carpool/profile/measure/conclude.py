"""Makes a profile of raw measurements: eq. 3–7, the memory line, slow-downs with intervals, and what predicts them.

`carpool profile` calls it at its end, and again whenever its raw file has grown. An interval is where a repetition of
the same measurement is to be expected, 19 times of 20: from the spread within the windows and, mostly, from how much
repeated measurements of this very session differ.

Measurements may be of several series, on several machines. A slow-down is relative to the job alone in its own series,
and so is its interval; times alone, which are what a user can expect of any machine, are the mean over all series.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, variance

from carpool.core.model import sub_batch
from carpool.core.perf import Placement
from carpool.profile.demand import fit_demands
from carpool.profile.fields import ProfileError
from carpool.profile.fit import fit_task, memory_line, significant
from carpool.profile.measure.noise import NORMAL, Noise
from carpool.profile.measure.predict import fit_busy, fit_kappa
from carpool.profile.measure.raw import MECHANISMS, Machine, Measurement, Setting
from carpool.profile.rows import GIB, Run
from carpool.profile.values import Gpu, Group, GroupJob, Interval, Kappa, Memory, Pair, Profile, TaskProfile

GUESSED_CONTEXT = round(0.7 * GIB)


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
    under = timed_under(measurements)
    runs = [run for m in sorted({*under.values()}) for run in solo_runs(measurements, m) if under[run.task] == m]
    tasks, names = {}, sorted({run.task for run in runs})
    untold = [name for name in names if len({run.batch / run.accumulation for run in runs if run.task == name}) < 2]
    for name in names:
        own = [run for run in runs if run.task == name]
        if name in untold and untold != names:
            continue  # a task that failed, or for which the budget was short, must not cost the others their profile
        norm = name in naming.batch_norm if naming.batch_norm else None
        tasks[name] = replace(_task(own, _contexts(measurements, name)), batch_norm=norm)
    noise = Noise(measurements)
    together = [done for done in measurements if len(done.samples) > 1]
    shared = [one for done in together if len(done.samples) == 2 and (one := pair_of(done, noise))]
    groups = [group for done in together if len(done.samples) > 2 and (group := _group(done, noise))]
    pairs = [pair.rounded(3) for pair in merge(shared, noise)]
    tasks, kappa = _predictors(tasks, pairs, _beside(shared, measurements))
    return Profile(
        name=naming.name,
        description=naming.description,
        gpu=Gpu(machine.gpu, machine.memory_bytes, machine.driver, 1),
        mechanisms={m: MECHANISM_NOTES[m] for m in sorted({done.wish.mechanism for done in measurements})},
        noise=noise.told(),
        notes=(
            *naming.notes,
            *_times_notes(richest(measurements), under, tasks, untold),
            *_unused_note(len(together) - len(shared) - len(groups)),
            ONE_GPU_NOTE,
        ),
        tasks=tasks,
        pairs=tuple(pairs),
        groups=tuple(groups),
        kappa=kappa,
        measured=f"{machine.date}, {machine.software}",
        raw=tuple(measurements),
    )


ONE_GPU_NOTE = "All measurements are of one GPU: the communication constants are unknown and stand at 0."
_UNDER = f"under ({'|'.join(MECHANISMS)})"
OWN_NOTES = re.compile(
    rf"Iteration times are those {_UNDER}(; of .+, {_UNDER})*\."
    r"|No iteration times of .+: alone at one batch size only\."
    r"|\d+ of the measurements tell no slow-down: .+\."
    rf"|{re.escape(ONE_GPU_NOTE)}"
)
"""What is written here, and not by a person; who concludes anew does not keep it."""
MECHANISM_NOTES = {
    "mps": "one MPS control daemon, no cap on threads, every process verified as its client",
    "time-slicing": "no MPS daemon: contexts take turns",
    "unknown": "not recorded",
}


def _times_notes(usual: str, under: Mapping[str, str], told: Collection[str], untold: Sequence[str]) -> Iterator[str]:
    apart = ""
    for mechanism in MECHANISMS:
        names = [name for name in told if usual != under[name] == mechanism]
        apart += f"; of {', '.join(names)}, under {mechanism}" if names else ""
    yield f"Iteration times are those under {usual}{apart}."
    if untold:
        yield f"No iteration times of {', '.join(untold)}: alone at one batch size only."


def _unused_note(unused: int) -> Iterator[str]:
    if unused:
        yield f"{unused} of the measurements tell no slow-down: not all their jobs ran alone in the same series."


def richest(measurements: Iterable[Measurement]) -> str:
    """The mechanism under which most settings ran alone. Times of several are not mixed: they may differ.

    Only a task that did not run alone under it takes its times from another.
    """
    alone = {(done.wish.mechanism, done.samples[0].setting) for done in measurements if len(done.samples) == 1}
    names = sorted(mechanism for mechanism, _ in alone) or ["unknown"]
    return max(dict.fromkeys(names), key=names.count)


def timed_under(measurements: Sequence[Measurement]) -> dict[str, str]:
    """By task, the mechanism of its times: the richest of all, or of its own where it never ran alone under that."""
    usual, found = richest(measurements), {}
    alone = [done for done in measurements if len(done.samples) == 1]
    for name in sorted({done.samples[0].setting.task for done in alone}):
        own = [done for done in alone if done.samples[0].setting.task == name]
        found[name] = usual if any(done.wish.mechanism == usual for done in own) else richest(own)
    return found


def solo_runs(measurements: Iterable[Measurement], mechanism: str) -> list[Run]:
    """One row for each setting that ran alone under a mechanism: the mean over its series and their repetitions."""
    measurements = list(measurements)
    noise = Noise(measurements)
    alone: dict[Setting, list[Measurement]] = {}
    for done in measurements:
        if len(done.samples) == 1 and done.wish.mechanism == mechanism:
            alone.setdefault(done.samples[0].setting, []).append(done)
    rows = []
    for setting, same in alone.items():
        peaks = [done.samples[0].peak_bytes for done in same]
        seconds = noise.alone(mechanism, setting)
        assert seconds is not None
        rows.append(
            Run(
                *(setting.task, setting.batch, setting.accumulation, 1, 1),
                seconds=seconds,
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
    """The median error of settings that the fit has not seen, and how many they are."""
    errors = held_out_errors(runs)
    return (median(errors), len(errors)) if errors else (None, 0)


def held_out_errors(runs: Sequence[Run], bend: bool = True) -> list[float]:
    """Each setting of a task in turn is left out of the fit and predicted, but for the smallest and the largest."""
    sizes = sorted({run.batch / run.accumulation for run in runs})
    errors = []
    for unseen in runs:
        seen = [run for run in runs if run is not unseen]
        inside = sizes[0] < unseen.batch / unseen.accumulation < sizes[-1]
        if inside and len({run.batch / run.accumulation for run in seen}) >= 2:
            predicted = fit_task(seen, bend=bend).core().iteration(unseen.batch, unseen.accumulation, Placement(1, 1))
            errors.append(abs(predicted / unseen.seconds - 1))
    return errors


def _memory(runs: Sequence[Run], contexts: Sequence[int]) -> Memory | None:
    told = [run for run in runs if run.memory_bytes is not None]
    if len({sub_batch(run.batch, run.accumulation) for run in told}) < 2:
        return None
    context = round(median(contexts)) if contexts else GUESSED_CONTEXT
    origin = "measured as the driver's figure less the allocator's" if contexts else "not told by the driver, a guess"
    if len({run.batch for run in told if run.accumulation == 1}) < 2:
        told = [replace(run, batch=sub_batch(run.batch, run.accumulation), accumulation=1) for run in told]
        origin += "; one batch only, so rows with accumulation stand for smaller ones"
    memory = memory_line(told, 1.0, context)
    return replace(memory, source=f"{memory.source}; the context was {origin}")


def _slowdowns(done: Measurement, noise: Noise) -> list[float] | None:
    alone = [noise.alone(done.wish.mechanism, sample.setting, done.series) for sample in done.samples]
    if None in alone:
        return None
    return [sample.iter_s / time for sample, time in zip(done.samples, alone, strict=True) if time is not None]


@dataclass(frozen=True, slots=True)
class Shared:
    """One run of a pair."""

    pair: Pair
    errors: tuple[float, float]
    """Of both windows."""
    series: int

    def turned(self) -> "Shared":
        """The same with the second job first."""
        return Shared(self.pair.turned(), self.errors[::-1], self.series)


def pair_of(done: Measurement, noise: Noise) -> Shared | None:
    xi = _slowdowns(done, noise)
    if xi is None:
        return None
    a, b = done.samples
    pair = Pair(a.setting.task, a.setting.batch, b.setting.task, b.setting.batch, done.wish.mechanism, xi[0], xi[1])
    return Shared(pair, (a.error, b.error), done.series)


def merge(measured: Sequence[Shared], noise: Noise) -> list[Pair]:
    """One pair for all its repetitions: the mean, and the interval of a further one.

    Whoever came first in its first run does; another call may have named its tasks in another order.
    """
    runs: dict[tuple[object, ...], list[Shared]] = {}
    for one in measured:
        turned = one.turned()
        like = turned if one.pair.who not in runs and turned.pair.who in runs else one
        runs.setdefault(like.pair.who, []).append(like)
    merged = []
    for same in runs.values():
        (xi_a, ends_a), (xi_b, ends_b) = (_over_series(same, noise, which) for which in (0, 1))
        both = replace(same[0].pair, xi_a=xi_a, xi_b=xi_b, interval_a=ends_a, interval_b=ends_b, runs=len(same))
        merged.append(both)
    return merged


def _over_series(same: Sequence[Shared], noise: Noise, which: int) -> tuple[float, Interval]:
    """ξ of a pair's first job (0) or second (1). A repetition may be of any series, so how they differ counts, too."""
    first = same[0].pair
    setting = (Setting(first.a, first.batch_a), Setting(first.b, first.batch_b))[which]
    xis, squares = [], []
    for series in sorted({one.series for one in same}):
        own = [one for one in same if one.series == series]
        xis.append(mean((one.pair.xi_a, one.pair.xi_b)[which] for one in own))
        error = max(one.errors[which] for one in own)
        squares.append(noise.half_width(first.mechanism, setting, error, len(own), series) ** 2)
    apart = variance(map(math.log, xis)) if len(xis) > 1 else 0.0
    xi, half = mean(xis), math.sqrt(mean(squares) + NORMAL**2 * apart)
    return xi, (xi * math.exp(-half), xi * math.exp(half))


def _group(done: Measurement, noise: Noise) -> Group | None:
    xi = _slowdowns(done, noise)
    if xi is None:
        return None
    jobs = tuple(GroupJob(sample.setting.task, sample.setting.batch) for sample in done.samples)
    return Group(jobs, done.wish.mechanism, tuple(round(x, 3) for x in xi))


def _predictors(
    tasks: dict[str, TaskProfile], pairs: Sequence[Pair], beside: Mapping[str, Sequence[Run]]
) -> tuple[dict[str, TaskProfile], dict[str, Kappa]]:
    busy = {name: task.busy for name, task in tasks.items() if task.busy is not None}
    kappas = {}
    for mechanism in sorted({pair.mechanism for pair in pairs}):
        own = [pair for pair in pairs if pair.mechanism == mechanism]
        kappas[mechanism] = fit_kappa(own, busy)
        fitted = fit_demands(own, beside[mechanism])
        for name in tasks.keys() & fitted.keys():
            tasks[name] = replace(tasks[name], demands=(*tasks[name].demands, *fitted[name]))
    return tasks, {mechanism: kappa for mechanism, kappa in kappas.items() if kappa is not None}


def _beside(shared: Sequence[Shared], measurements: Sequence[Measurement]) -> dict[str, list[Run]]:
    """By mechanism, times alone of the series with pairs: demands explain their slow-downs, on their machines."""
    found = {}
    for mechanism in {one.pair.mechanism for one in shared}:
        series = {one.series for one in shared if one.pair.mechanism == mechanism}
        own = [done for done in measurements if done.series in series]
        found[mechanism] = solo_runs(own, richest(own))
    return found
