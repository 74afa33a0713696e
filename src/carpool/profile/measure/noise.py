"""Measures how well measurements repeat: times alone over their repetitions, and their differences.

`conclude.py` derives intervals from it.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import mean, median, variance

from carpool.profile.measure.raw import Measurement, Sample, Setting

NORMAL = 1.96
PRIOR_WEIGHT = 2
"""Number of repetitions at which a task's own noise counts as much as that of all tasks."""


class Noise:
    """The difference between runs of the same measurement, by series, mechanism and task, in log(seconds).

    Runs are compared within a series only, because ξ is: differences between the machines of two series cancel out.
    """

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._solo: dict[tuple[str, Setting], dict[int, list[float]]] = {}
        self._window: dict[tuple[int, str, Setting], float] = {}
        self._spread: dict[tuple[int, str, str], list[float]] = {}
        self._between: dict[str, list[float]] = {}
        self._sigma: dict[tuple[str, str, int], float] = {}
        same: dict[tuple[str, tuple[Setting, ...]], dict[int, list[list[Sample]]]] = {}
        for done in measurements:
            mechanism, series = done.request.mechanism, done.series
            samples = sorted(done.samples, key=lambda sample: sample.setting)  # another call may use another order
            together = tuple(sample.setting for sample in samples)
            same.setdefault((mechanism, together), {}).setdefault(series, []).append(samples)
            if len(done.samples) == 1:
                (sample,) = done.samples
                self._solo.setdefault((mechanism, sample.setting), {}).setdefault(series, []).append(sample.iter_s)
                self._window[series, mechanism, sample.setting] = sample.error
        for (mechanism, settings), by_series in same.items():
            for at, setting in enumerate(settings):
                logs = {n: [math.log(samples[at].iter_s) for samples in runs] for n, runs in by_series.items()}
                for series, runs in logs.items():
                    if len(runs) > 1:
                        self._spread.setdefault((series, mechanism, setting.task), []).append(variance(runs))
                if len(logs) > 1:
                    self._between.setdefault(mechanism, []).append(variance(map(mean, logs.values())))

    def alone(self, mechanism: str, setting: Setting, series: int | None = None) -> float | None:
        """Return the time alone of one series, or the mean of all.

        Every series counts the same, however often it repeated the setting. Otherwise the curve would bend towards the
        machine that repeated some settings more often.
        """
        times = self._solo.get((mechanism, setting), {})
        if series is None:
            return mean(map(mean, times.values())) if times else None
        return mean(times[series]) if series in times else None

    def sigma(self, mechanism: str, task: str, series: int = 0) -> float:
        """Return a task's spread, pulled towards that of all tasks if it was rarely repeated; 0 without repetitions.

        A series without repetitions is assumed to be as noisy as the others.
        """
        found = self._sigma.get((mechanism, task, series))
        if found is None:
            found = self._sigma[mechanism, task, series] = self._pulled_sigma(mechanism, task, series)
        return found

    def _pulled_sigma(self, mechanism: str, task: str, series: int) -> float:
        near = {key: values for key, values in self._spread.items() if key[:2] == (series, mechanism)}
        near = near or {key: values for key, values in self._spread.items() if key[1] == mechanism}
        everything = [v for values in near.values() for v in values]
        if not everything:
            return 0.0
        own = [v for key, values in near.items() if key[2] == task for v in values]
        return math.sqrt((sum(own) + PRIOR_WEIGHT * mean(everything)) / (len(own) + PRIOR_WEIGHT))

    def half_width(self, mechanism: str, setting: Setting, error: float, runs: int, series: int = 0) -> float:
        """Return the half-width of the interval of log ξ for one repetition, given `runs` runs of a series."""
        alone_runs = len(self._solo.get((mechanism, setting), {}).get(series, ())) or 1
        between = NORMAL * self.sigma(mechanism, setting.task, series)
        within = self._window.get((series, mechanism, setting), 0.0)
        return math.sqrt(between**2 * (1 + 1 / runs + 1 / alone_runs) + error**2 + within**2)

    def describe(self) -> str:
        parts = []
        for mechanism in sorted({m for _, m, _ in self._spread}):
            spread = [v for (_, m, _), values in self._spread.items() if m == mechanism for v in values]
            parts.append(f"under {mechanism} the same measurement made twice differs by {_differ(spread)} repeated)")
        text = "; ".join(parts) or "nothing was measured twice: the intervals are those of single windows"
        if parts:
            text += ". Intervals are where 95 % of repetitions are expected; ξ below 1 counts as 1"
        if self._between:
            apart = "; ".join(f"under {m} by {_differ(self._between[m])} compared)" for m in sorted(self._between))
            text += f". Between series the same measurement differs {apart}; ξ is relative within each"
        return f"{text[0].upper()}{text[1:]}."


def _differ(variances: Sequence[float]) -> str:
    every = sorted(math.expm1(math.sqrt(2 * v)) for v in variances)  # by how much the slower of two runs takes longer
    return f"{100 * median(every):.1f} % in the median and by up to {100 * every[-1]:.0f} % ({len(every)}"
