"""Makes a profile from raw measurements: eq. 3–7, the memory line, slow-downs with intervals, and their predictors.

`carpool profile` calls it at its end. An interval contains a repetition of the same measurement 19 times out of 20. It
is derived from the spread within the windows and, mostly, from the difference between repeated measurements.

Measurements may belong to several series on several machines. A slow-down and its interval are relative to the job
alone in the same series. Times alone are the mean over all series: what a user can expect of any machine.
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
from carpool.profile.measure.raw import MECHANISMS, MeasuredMachine, Measurement, Setting
from carpool.profile.rows import GIB, Run
from carpool.profile.values import Gpu, Group, GroupJob, Interval, Kappa, Memory, Pair, Profile, TaskProfile

GUESSED_CONTEXT = round(0.7 * GIB)


@dataclass(frozen=True, slots=True)
class Naming:
    """The user's labels for a profile."""

    name: str
    description: str = ""
    batch_norm: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def conclude(machine: MeasuredMachine, measurements: Sequence[Measurement], naming: Naming) -> Profile:
    if not measurements:
        raise ProfileError("nothing was measured; give more --minutes")
    under = timed_under(measurements)
    runs = [run for m in sorted({*under.values()}) for run in solo_runs(measurements, m) if under[run.task] == m]
    tasks, names = {}, sorted({run.task for run in runs})
    untimed = [name for name in names if len({run.batch / run.accumulation for run in runs if run.task == name}) < 2]
    for name in names:
        own = [run for run in runs if run.task == name]
        if name in untimed and untimed != names:
            continue  # the other tasks still get their profile
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
        mechanisms={m: MECHANISM_NOTES[m] for m in sorted({done.request.mechanism for done in measurements})},
        noise=noise.describe(),
        notes=(
            *naming.notes,
            *_times_notes(richest(measurements), under, tasks, untimed),
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
"""Pattern of the notes written here, not by a user. They are dropped when a profile is made again."""
MECHANISM_NOTES = {
    "mps": "one MPS control daemon, no cap on threads, every process verified as its client",
    "time-slicing": "no MPS daemon: contexts take turns",
    "unknown": "not recorded",
}


def _times_notes(usual: str, under: Mapping[str, str], timed: Collection[str], untimed: Sequence[str]) -> Iterator[str]:
    apart = ""
    for mechanism in MECHANISMS:
        names = [name for name in timed if usual != under[name] == mechanism]
        apart += f"; of {', '.join(names)}, under {mechanism}" if names else ""
    yield f"Iteration times are those under {usual}{apart}."
    if untimed:
        yield f"No iteration times of {', '.join(untimed)}: alone at one batch size only."


def _unused_note(unused: int) -> Iterator[str]:
    if unused:
        yield f"{unused} of the measurements tell no slow-down: not all their jobs ran alone in the same series."


def richest(measurements: Iterable[Measurement]) -> str:
    """Return the mechanism under which most settings ran alone.

    Times of several mechanisms are not mixed, because they may differ. Only a task that did not run alone under this
    mechanism takes its times from another.
    """
    alone = {(done.request.mechanism, done.samples[0].setting) for done in measurements if len(done.samples) == 1}
    names = sorted(mechanism for mechanism, _ in alone) or ["unknown"]
    return max(dict.fromkeys(names), key=names.count)


def timed_under(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Return, by task, the mechanism of its times: the richest overall, or the task's own richest."""
    usual, found = richest(measurements), {}
    alone = [done for done in measurements if len(done.samples) == 1]
    for name in sorted({done.samples[0].setting.task for done in alone}):
        own = [done for done in alone if done.samples[0].setting.task == name]
        found[name] = usual if any(done.request.mechanism == usual for done in own) else richest(own)
    return found


def solo_runs(measurements: Iterable[Measurement], mechanism: str) -> list[Run]:
    """Return one row per setting that ran alone under a mechanism: the mean over series and repetitions."""
    measurements = list(measurements)
    noise = Noise(measurements)
    alone: dict[Setting, list[Measurement]] = {}
    for done in measurements:
        if len(done.samples) == 1 and done.request.mechanism == mechanism:
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
    """Return the median error of settings left out of the fit, and their number."""
    errors = held_out_errors(runs)
    return (median(errors), len(errors)) if errors else (None, 0)


def held_out_errors(runs: Sequence[Run], bend: bool = True) -> list[float]:
    """Predict each setting of a task from a fit without it, except the smallest and the largest."""
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
    with_memory = [run for run in runs if run.memory_bytes is not None]
    if len({sub_batch(run.batch, run.accumulation) for run in with_memory}) < 2:
        return None
    context = round(median(contexts)) if contexts else GUESSED_CONTEXT
    origin = (
        "measured as the driver's figure less the allocator's" if contexts else "not reported by the driver, a guess"
    )
    if len({run.batch for run in with_memory if run.accumulation == 1}) < 2:
        with_memory = [
            replace(run, batch=sub_batch(run.batch, run.accumulation), accumulation=1) for run in with_memory
        ]
        origin += "; one batch only, so rows with accumulation stand for smaller ones"
    memory = memory_line(with_memory, 1.0, context)
    return replace(memory, source=f"{memory.source}; the context was {origin}")


def _slowdowns(done: Measurement, noise: Noise) -> list[float] | None:
    alone = [noise.alone(done.request.mechanism, sample.setting, done.series) for sample in done.samples]
    if None in alone:
        return None
    return [sample.iter_s / time for sample, time in zip(done.samples, alone, strict=True) if time is not None]


@dataclass(frozen=True, slots=True)
class PairRun:
    """One run of a pair."""

    pair: Pair
    errors: tuple[float, float]
    """Relative errors of both windows."""
    series: int

    def turned(self) -> "PairRun":
        """Return the same run with the second job first."""
        return PairRun(self.pair.turned(), self.errors[::-1], self.series)


def pair_of(done: Measurement, noise: Noise) -> PairRun | None:
    xi = _slowdowns(done, noise)
    if xi is None:
        return None
    a, b = done.samples
    pair = Pair(a.setting.task, a.setting.batch, b.setting.task, b.setting.batch, done.request.mechanism, xi[0], xi[1])
    return PairRun(pair, (a.error, b.error), done.series)


def merge(measured: Sequence[PairRun], noise: Noise) -> list[Pair]:
    """Merge the repetitions of each pair: the mean, and the expected interval of another repetition.

    Another call may have named the tasks in another order; the order of the first run is kept.
    """
    runs: dict[tuple[object, ...], list[PairRun]] = {}
    for one in measured:
        turned = one.turned()
        like = turned if one.pair.key not in runs and turned.pair.key in runs else one
        runs.setdefault(like.pair.key, []).append(like)
    merged = []
    for same in runs.values():
        (xi_a, ends_a), (xi_b, ends_b) = (_over_series(same, noise, which) for which in (0, 1))
        both = replace(same[0].pair, xi_a=xi_a, xi_b=xi_b, interval_a=ends_a, interval_b=ends_b, runs=len(same))
        merged.append(both)
    return merged


def _over_series(same: Sequence[PairRun], noise: Noise, which: int) -> tuple[float, Interval]:
    """Return ξ of a pair's first (0) or second (1) job. The interval covers the difference between series as well."""
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
    return Group(jobs, done.request.mechanism, tuple(round(x, 3) for x in xi))


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


def _beside(shared: Sequence[PairRun], measurements: Sequence[Measurement]) -> dict[str, list[Run]]:
    """Return, by mechanism, times alone of the series that have pairs, from which demands are fitted."""
    found = {}
    for mechanism in {one.pair.mechanism for one in shared}:
        series = {one.series for one in shared if one.pair.mechanism == mechanism}
        own = [done for done in measurements if done.series in series]
        found[mechanism] = solo_runs(own, richest(own))
    return found
