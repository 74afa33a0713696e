"""Builds a profile from measurement files: the work of `carpool fit` after its options are parsed.

It fits tasks and memory and merges repeated pairs. It also adds notes about the data: batches that ran faster than
smaller ones, communication that no row covers, and batches that ran although the memory line says they do not fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from carpool.core.model import sub_batch
from carpool.profile.demand import fit_demands
from carpool.profile.efficiency import fit_scaling, read_epochs
from carpool.profile.fields import ProfileError
from carpool.profile.fit import fit_memory, fit_task
from carpool.profile.measure.raw import MECHANISMS
from carpool.profile.rows import GIB, Run, merge_pairs, read_pairs, read_runs
from carpool.profile.values import Demand, Gpu, Group, Memory, Pair, Profile, TaskProfile
from carpool.units import parse_bytes

FASTER = 0.95
"""Ratio of times on one GPU below which a larger batch is noted as faster than the next smaller one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """The options of `carpool fit`."""

    name: str
    description: str = ""
    throughput: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    efficiency: tuple[str, ...] = ()
    most_per_gpu: tuple[str, ...] = ()
    most_gpus: tuple[str, ...] = ()
    activation_scale: float = 2.0
    context_gib: float = 0.7
    pairs: tuple[str, ...] = ()
    mechanism: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_memory: str | None = None
    gpus_per_node: int | None = None
    driver: str | None = None
    batch_norm: tuple[str, ...] = ()
    noise: str | None = None
    note: tuple[str, ...] = ()


def build(request: FitRequest) -> Profile:
    if not (request.throughput or request.pairs):
        raise ProfileError("nothing to fit; give --throughput for tasks, --pairs for slow-downs, or both")
    if request.memory and not request.throughput:
        raise ProfileError("--memory: memory belongs to tasks; give --throughput as well")
    gpu = _gpu(request)
    runs = [run for path in request.throughput for run in read_runs(path)]
    tasks, notes = _tasks(request, runs, gpu.memory_bytes if gpu else None)
    pairs, groups = _pairs(request)
    tasks = _with_demands(_with_scaling(request, tasks, runs), pairs, runs)
    return Profile(
        name=request.name,
        description=request.description,
        gpu=gpu,
        noise=request.noise,
        notes=(*request.note, *notes),
        tasks=tasks,
        pairs=tuple(pairs),
        groups=tuple(groups),
    )


def _gpu(request: FitRequest) -> Gpu | None:
    if request.gpu is None:
        if request.gpu_memory or request.driver or request.gpus_per_node:
            raise ProfileError("--gpu: missing; name the GPU that the other options describe")
        return None
    memory = parse_bytes(request.gpu_memory) if request.gpu_memory is not None else None
    return Gpu(request.gpu, memory, request.driver, request.gpus_per_node)


def _tasks(
    request: FitRequest, runs: Sequence[Run], gpu_memory: int | None
) -> tuple[dict[str, TaskProfile], list[str]]:
    names = sorted({run.task for run in runs})
    memory = fit_memory(request.memory, request.activation_scale, request.context_gib) if request.memory else {}
    for unknown in set(request.batch_norm) - set(names):
        raise ProfileError(f"--batch-norm {unknown}: no such task in the rows; they have {', '.join(names) or 'none'}")
    source = ", ".join(Path(path).name for path in request.throughput)
    tasks, notes = {}, []
    for name in names:
        own = [run for run in runs if run.task == name]
        norm = name in request.batch_norm if request.batch_norm else None
        tasks[name] = replace(fit_task(own), memory=memory.get(name), batch_norm=norm, source=source)
        notes += _odd_speeds(own) + _unfitting(own, memory.get(name), gpu_memory)
        if request.memory and name not in memory:
            notes.append(f"{name}: no memory rows, so its memory counts as 0.")
    if runs and all(run.gpus == 1 for run in runs):
        notes.append("All rows come from one GPU: the communication constants are unknown and stand at 0.")
    return tasks, notes


def _with_scaling(request: FitRequest, tasks: dict[str, TaskProfile], runs: Sequence[Run]) -> dict[str, TaskProfile]:
    per_gpu = _numbers("--most-per-gpu", request.most_per_gpu, tasks)
    gpus = _numbers("--most-gpus", request.most_gpus, tasks)
    if not request.efficiency and (per_gpu or gpus):
        raise ProfileError("--most-per-gpu, --most-gpus: they limit how tasks scale; give --efficiency as well")
    scaled = dict(tasks)
    for path in request.efficiency:
        for name, batches in read_epochs(path).items():
            if name in tasks:
                if len(batches) < 2:
                    raise ProfileError(f"{path}: {name}: rows of one batch only; give at least two batches")
                own = [run for run in runs if run.task == name]
                scaling, error = fit_scaling(batches, own, per_gpu.get(name), gpus.get(name))
                scaled[name] = replace(tasks[name], scaling=scaling, scaling_error=error)
    if request.efficiency and all(task.scaling is None for task in scaled.values()):
        raise ProfileError("--efficiency: its tasks and those of --throughput have no name in common; check both files")
    return scaled


def _numbers(option: str, texts: Sequence[str], tasks: Iterable[str]) -> dict[str, int]:
    """Parse options of the form `task=8`."""
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in tasks:
            raise ProfileError(f"{option} {text}: no such task in the rows; they have {', '.join(tasks) or 'none'}")
        if not number.isdecimal() or int(number) < 1:
            raise ProfileError(f"{option} {text}: write it as {name}=8")
        found[name] = int(number)
    return found


def _with_demands(tasks: dict[str, TaskProfile], pairs: Sequence[Pair], runs: Sequence[Run]) -> dict[str, TaskProfile]:
    found: dict[str, tuple[Demand, ...]] = {}
    for mechanism in sorted({pair.mechanism for pair in pairs}) if tasks else ():
        for name, demands in fit_demands([pair for pair in pairs if pair.mechanism == mechanism], runs).items():
            found[name] = (*found.get(name, ()), *demands)
    return {name: replace(task, demands=found.get(name, ())) for name, task in tasks.items()}


def _odd_speeds(runs: Sequence[Run]) -> list[str]:
    """Return notes on batches that ran clearly faster on one GPU than the next smaller one."""
    times: dict[int, list[float]] = {}
    for run in runs:
        if run.gpus == run.accumulation == 1:
            times.setdefault(run.batch, []).append(run.seconds)
    steps = [(batch, median(times[batch])) for batch in sorted(times)]
    return [
        f"{runs[0].task}: on one GPU batch {b} ({t:.4g} s) ran faster than batch {smaller} ({longer:.4g} s)."
        for (smaller, longer), (b, t) in pairwise(steps)
        if t < FASTER * longer
    ]


def _unfitting(runs: Sequence[Run], memory: Memory | None, gpu_memory: int | None) -> list[str]:
    if memory is None or gpu_memory is None:
        return []
    largest = max(sub_batch(run.batch, run.accumulation) for run in runs)
    need = memory.static_bytes + memory.bytes_per_sample * largest
    if need <= gpu_memory:
        return []
    return [
        f"{runs[0].task}: batch {largest} ran on this GPU, but the memory line predicts {need / GIB:.1f} of "
        f"{gpu_memory / GIB:.1f} GiB for it: the line overestimates this task."
    ]


def _pairs(request: FitRequest) -> tuple[list[Pair], list[Group]]:
    mechanisms = request.mechanism or ("unknown",)
    if len(mechanisms) == 1:
        mechanisms = mechanisms * len(request.pairs)
    if len(mechanisms) != len(request.pairs):
        raise ProfileError(
            f"--mechanism: {len(mechanisms)} of them for {len(request.pairs)} --pairs; give it once, or once for each"
        )
    pairs: list[Pair] = []
    groups: list[Group] = []
    for path, mechanism in zip(request.pairs, mechanisms, strict=True):
        if mechanism not in MECHANISMS:
            raise ProfileError(f"--mechanism {mechanism}: unknown; give {', '.join(MECHANISMS)}")
        some, larger = read_pairs(path, mechanism, source=Path(path).name)
        if not some and not larger:
            raise ProfileError(f"{path}: no pair or group rows; give a file that has some")
        pairs += some
        groups += [replace(group, xi=tuple(round(xi, 4) for xi in group.xi)) for group in larger]
    return [pair.rounded(4) for pair in merge_pairs(pairs)], groups
