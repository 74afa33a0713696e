"""Merges profiles that were measured on the same kind of GPU into one. Each becomes a series of its own.

`carpool profiles merge` calls it. Only raw measurements are taken from the profiles; everything else is fitted again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from carpool.profile.fields import ProfileError
from carpool.profile.measure.conclude import OWN_NOTES, Naming, conclude
from carpool.profile.measure.raw import MeasuredMachine, Measurement, Setting, tasks_of
from carpool.profile.values import Gpu, Profile

SAME_MEMORY = 1.2
"""Maximum ratio of the memory of one task at one batch in two profiles.

The same training takes the same memory on every GPU of a kind. Another version of PyTorch changes it a little; another
model or precision changes it more.
"""


@dataclass(frozen=True, slots=True)
class NamedProfile:
    """A profile and the name under which the user gave it."""

    called: str
    profile: Profile


def merge(
    inputs: Sequence[NamedProfile], name: str | None = None, description: str | None = None, notes: Sequence[str] = ()
) -> Profile:
    """Merge profiles, keeping all notes. Name and description default to those of the first."""
    if len(inputs) < 2:
        raise ProfileError("a merge needs at least two profiles; give them by name or path")
    first = inputs[0].profile
    gpus = [_gpu(one) for one in inputs]
    _check_they_differ(inputs)
    _check_memory(inputs)
    norms = _batch_norms(inputs)
    kept = [note for one in inputs for note in one.profile.notes if not OWN_NOTES.fullmatch(note)]
    naming = Naming(
        name or first.name,
        first.description if description is None else description,
        notes=tuple(dict.fromkeys((*kept, *notes))),
    )
    memory = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=None)
    machine = MeasuredMachine(gpus[0].name, memory, _joined(gpu.driver for gpu in gpus), date="", software="")
    found = conclude(machine, list(_renumbered(inputs)), naming)
    return replace(
        found,
        tasks={called: replace(task, batch_norm=norms.get(called)) for called, task in found.tasks.items()},
        measured=_joined(one.profile.measured for one in inputs),
    )


def unchecked(inputs: Sequence[NamedProfile]) -> str:
    """Return what the files do not record and the user must know."""
    counts = Counter(task for one in inputs for task in tasks_of(one.profile.raw))
    common = sorted(task for task, number in counts.items() if number > 1)
    if not common:
        return "no task is in two of the profiles, so their machines cannot be compared"
    return (
        "not checked, because profiles do not record it: that the same scripts with the same arguments ran as "
        f"{', '.join(common)}"
    )


def _gpu(one: NamedProfile) -> Gpu:
    if not one.profile.raw:
        raise ProfileError(
            f"{one.called}: has no raw measurements to merge; give profiles that carpool profile measured"
        )
    if one.profile.gpu is None:
        raise ProfileError(f"{one.called}: does not name its GPU; give profiles that carpool profile measured")
    return one.profile.gpu


def _check_they_differ(inputs: Sequence[NamedProfile]) -> None:
    for one, other in combinations(inputs, 2):
        first, second = one.profile.gpu, other.profile.gpu
        assert first is not None
        assert second is not None
        if first.name != second.name:
            raise ProfileError(
                f"{other.called}: measured on {second.name}, and {one.called} on {first.name}; "
                "merge only profiles of the same GPU"
            )
        if _have_a_series_in_common(one.profile.raw, other.profile.raw):
            raise ProfileError(
                f"{other.called}: contains the same measurements as {one.called}; give each profile once"
            )


def _have_a_series_in_common(first: Iterable[Measurement], second: Iterable[Measurement]) -> bool:
    """Return whether two profiles share at least half of a series. One file may be older; a few match by chance."""
    mine, others = _by_series(first), _by_series(second)
    return any(2 * len(a & b) >= min(len(a), len(b)) for a in mine.values() for b in others.values())


def _by_series(measurements: Iterable[Measurement]) -> dict[int, set[Measurement]]:
    found: dict[int, set[Measurement]] = {}
    for done in measurements:
        found.setdefault(done.series, set()).add(replace(done, series=0))
    return dict(sorted(found.items()))


def _check_memory(inputs: Sequence[NamedProfile]) -> None:
    known: dict[Setting, tuple[str, int]] = {}
    for one in inputs:
        for setting, peak in _peaks(one.profile.raw).items():
            called, before = known.setdefault(setting, (one.called, peak))
            if max(peak, before) > SAME_MEMORY * min(peak, before):
                raise ProfileError(
                    f"{one.called}: {setting.task} at batch {setting.batch} takes {peak / 2**20:.0f} MiB, and "
                    f"{before / 2**20:.0f} MiB in {called}, so it is not the same training; measure the same script"
                )


def _peaks(measurements: Iterable[Measurement]) -> dict[Setting, int]:
    peaks: dict[Setting, int] = {}
    for done in measurements:
        (sample, *mates) = done.samples
        if not mates and sample.peak_bytes:
            peaks[sample.setting] = max(peaks.get(sample.setting, 0), sample.peak_bytes)
    return peaks


def _batch_norms(inputs: Sequence[NamedProfile]) -> dict[str, bool]:
    norms: dict[str, bool] = {}
    for one in inputs:
        for name, task in one.profile.tasks.items():
            if task.batch_norm is not None and norms.setdefault(name, task.batch_norm) != task.batch_norm:
                raise ProfileError(
                    f"{one.called}: tasks.{name}.batch_norm: {task.batch_norm}, unlike before, so it is not the same "
                    "training; measure the same script"
                )
    return norms


def _renumbered(inputs: Sequence[NamedProfile]) -> Iterator[Measurement]:
    """Renumber the series of all profiles consecutively."""
    begin = 0
    for one in inputs:
        numbers = {series: begin + i for i, series in enumerate(_by_series(one.profile.raw))}
        begin += len(numbers)
        yield from (replace(done, series=numbers[done.series]) for done in one.profile.raw)


def _joined(texts: Iterable[str | None]) -> str | None:
    """Join texts without duplicates. A text may itself be such a list."""
    parts = (part for text in texts if text for part in text.split("; "))
    return "; ".join(dict.fromkeys(parts)) or None
