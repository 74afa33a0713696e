"""The profile file: tasks and how they share one kind of GPU, as versioned JSON.

A profile contains fitted tasks (eq. 3, 4, 7, memory, how busy they keep the GPU), measured pairs and groups per sharing
mechanism, and raw measurements, or any part of these. `carpool profile` and `carpool fit` write it; the simulator and
the service load it. Loading is strict: an invalid field is refused with its path.
`docs/reference/profile-files.md` describes every field.
"""

import json
from dataclasses import asdict, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from carpool.core.elastic import NoisePhase, Scaling
from carpool.core.perf import AllReduce
from carpool.errors import nearest
from carpool.fields import NotReadable, read_json_text
from carpool.files import whole_file
from carpool.profile.fields import ProfileError, ProfileFields
from carpool.profile.measure.raw import MECHANISMS, measurement, plain
from carpool.profile.values import (
    Busy,
    Demand,
    FitError,
    Gpu,
    Group,
    GroupJob,
    Interval,
    Kappa,
    Memory,
    Pair,
    Point,
    Profile,
    TaskProfile,
)

__all__ = ["SCHEMA", "Profile", "ProfileError", "dumps", "load", "loads", "save", "shipped"]

SCHEMA = 2


def shipped() -> list[str]:
    """Return the names of the shipped profiles."""
    library = resources.files("carpool.profile") / "library"
    return sorted(entry.name.removesuffix(".json") for entry in library.iterdir() if entry.name.endswith(".json"))


def load(name_or_path: str | Path) -> Profile:
    """Load a shipped profile by name, or any profile by path."""
    wanted = str(name_or_path)
    names = shipped()
    if wanted in names:
        text = (resources.files("carpool.profile") / "library" / f"{wanted}.json").read_text(encoding="utf-8")
        return loads(text, f"{wanted}.json")
    path = Path(wanted)
    try:
        return loads(path.read_text(encoding="utf-8"), wanted)
    except FileNotFoundError:
        raise ProfileError(f"{wanted}: no such profile ({nearest(path.stem, names)}); give a name or a path") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{wanted}: not a text file; give a profile in JSON") from None
    except OSError as error:
        raise ProfileError(f"{wanted}: cannot read it ({error.strerror}); give a profile's file or name") from None


def loads(text: str, file: str) -> Profile:
    """Parse a profile; `file` is its name in messages."""
    try:
        value = read_json_text(text, lambda pairs: _unique(pairs, file))
    except NotReadable as error:
        problem = f"line {error.line}: not JSON ({error.problem}); write it with carpool fit"
        raise ProfileError(f"{file}: {problem}") from None
    fields = ProfileFields(value, file)
    schema = fields.whole("schema", 1)
    if schema > SCHEMA:
        fields.fail("schema", f"{schema} is newer than this Carpool reads ({SCHEMA}); upgrade Carpool")
    profile = Profile(
        name=fields.text("name"),
        description=fields.text("description"),
        gpu=fields.maybe("gpu", lambda key: _gpu(fields.child(key))),
        mechanisms=fields.named_texts("mechanisms"),
        noise=fields.maybe("noise", fields.text),
        notes=fields.texts("notes"),
        tasks={name: _task(task) for name, task in fields.named("tasks").items()},
        pairs=tuple(_pair(pair) for pair in fields.children("pairs")),
        groups=tuple(_group(group) for group in fields.children("groups")),
        points=tuple(_point(point) for point in fields.children("points")),
        kappa={_known_mechanism(name, fields): _kappa(f) for name, f in fields.named("kappa").items()},
        measured=fields.maybe("measured", fields.text),
        raw=tuple(measurement(done) for done in fields.children("raw")),
    )
    fields.done()
    if not (profile.tasks or profile.pairs or profile.groups or profile.points):
        raise ProfileError(f"{file}: it has no tasks, pairs, groups or points; create it with carpool fit")
    return profile


def _unique(pairs: list[tuple[str, Any]], file: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ProfileError(f"{file}: {key}: given twice in one object; keep one of them")
        seen[key] = value
    return seen


def _gpu(f: ProfileFields) -> Gpu:
    gpu = Gpu(
        name=f.text("name"),
        memory_bytes=f.maybe("memory_bytes", lambda key: f.whole(key, 1)),
        driver=f.maybe("driver", f.text),
        gpus_per_node=f.maybe("gpus_per_node", lambda key: f.whole(key, 1)),
    )
    f.done()
    return gpu


def _task(f: ProfileFields) -> TaskProfile:
    task = TaskProfile(
        alpha_s=f.number("alpha_s", 0),
        beta_s=f.number("beta_s", 0),
        intra=_all_reduce(f.child("intra")),
        inter=_all_reduce(f.child("inter")),
        delta=f.number("delta", 1),
        memory=f.maybe("memory", lambda key: _memory(f.child(key))),
        batch_norm=f.maybe("batch_norm", f.flag),
        error=f.maybe("error", lambda key: _error(f.child(key))),
        source=f.maybe("source", f.text),
        busy=f.maybe("busy", lambda key: _busy(f.child(key))),
        demands=tuple(_demand(demand) for demand in f.children("demands")),
        scaling=f.maybe("scaling", lambda key: _scaling(f.child(key))),
        scaling_error=f.maybe("scaling_error", lambda key: _error(f.child(key))),
        knee=f.maybe("knee", lambda key: f.number(key, 1)),
    )
    f.done()
    if task.alpha_s == task.beta_s == 0:
        f.fail("alpha_s", "zero, and beta_s too, so that an iteration takes no time; fit the task again")
    return task


def _busy(f: ProfileFields) -> Busy:
    busy = Busy(f.number("alpha_s", 0), f.number("beta_s", 0))
    f.done()
    if busy.beta_s == 0:
        f.fail("beta_s", "0, so that the GPU never works; fit the task again")
    return busy


def _demand(f: ProfileFields) -> Demand:
    demand = Demand(_mechanism(f), f.whole("batch", 1), f.number("demand", 0))
    f.done()
    return demand


def _kappa(f: ProfileFields) -> Kappa:
    kappa = Kappa(f.number("kappa", 0), f.number("median_error", 0), f.whole("pairs", 1))
    f.done()
    return kappa


def _scaling(f: ProfileFields) -> Scaling:
    initial, least = f.whole("initial_batch", 1), f.whole("min_sub_batch", 1)
    scaling = Scaling(
        initial_batch=initial,
        max_batch=f.whole("max_batch", initial),
        min_sub_batch=least,
        max_sub_batch=f.whole("max_sub_batch", least),
        phases=tuple(_phase(phase) for phase in f.children("phases")),
        max_gpus=f.maybe("max_gpus", lambda key: f.whole(key, 1)),
    )
    f.done()
    ends = [phase.until for phase in scaling.phases]
    if not ends or ends[0] <= 0 or ends[-1] != 1 or any(a >= b for a, b in pairwise(ends)):
        f.fail(
            "phases", "their ends do not rise to 1; give each phase a larger `until` than the one before, the last 1"
        )
    return scaling


def _phase(f: ProfileFields) -> NoisePhase:
    phase = NoisePhase(f.number("until", 0), f.number("noise", 0))
    f.done()
    return phase


def _all_reduce(f: ProfileFields) -> AllReduce:
    constants = AllReduce(f.number("base_s", 0), f.number("per_gpu_s", 0))
    f.done()
    return constants


def _memory(f: ProfileFields) -> Memory:
    memory = Memory(
        static_bytes=f.whole("static_bytes", 0),
        bytes_per_sample=f.number("bytes_per_sample", 0),
        source=f.text("source"),
        context_bytes=f.maybe("context_bytes", lambda key: f.whole(key, 0)),
        gradient_bytes=f.maybe("gradient_bytes", lambda key: f.whole(key, 0)),
    )
    f.done()
    return memory


def _error(f: ProfileFields) -> FitError:
    def share(key: str) -> float | None:
        return f.maybe(key, lambda name: f.number(name, 0))

    error = FitError(
        median=f.number("median", 0),
        p90=f.number("p90", 0),
        points=f.whole("points", 1),
        left_out=f.whole("left_out", 0, default=0),
        why_left_out=f.maybe("why_left_out", f.text),
        median_one_gpu=share("median_one_gpu"),
        median_one_node=share("median_one_node"),
        median_several_nodes=share("median_several_nodes"),
        held_out_median=share("held_out_median"),
        held_out_points=f.maybe("held_out_points", lambda key: f.whole(key, 1)),
    )
    f.done()
    if error.left_out and not error.why_left_out:
        f.fail("why_left_out", "missing although points were left out; say why")
    return error


def _pair(f: ProfileFields) -> Pair:
    pair = Pair(
        a=f.text("a"),
        batch_a=f.whole("batch_a", 0, default=0),
        b=f.text("b"),
        batch_b=f.whole("batch_b", 0, default=0),
        mechanism=_mechanism(f),
        xi_a=_xi(f, "xi_a"),
        xi_b=_xi(f, "xi_b"),
        interval_a=f.maybe("interval_a", lambda key: _interval(f, key)),
        interval_b=f.maybe("interval_b", lambda key: _interval(f, key)),
        runs=f.whole("runs", 1, default=1),
        source=f.maybe("source", f.text),
    )
    f.done()
    return pair


def _group(f: ProfileFields) -> Group:
    jobs = tuple(_group_job(job) for job in f.children("jobs"))
    group = Group(jobs, _mechanism(f), f.numbers("xi", 0), f.maybe("source", f.text))
    f.done()
    if len(jobs) < 3:
        f.fail("jobs", f"{len(jobs)} jobs; a group has three or more, two are a pair")
    if len(group.xi) != len(jobs):
        f.fail("xi", f"{len(group.xi)} values for {len(jobs)} jobs; give one for each job")
    if min(group.xi) <= 0:
        f.fail("xi", "0 is not a slow-down; give 1 for a job that is not slowed down")
    return group


def _group_job(f: ProfileFields) -> GroupJob:
    job = GroupJob(f.text("task"), f.whole("batch", 0, default=0))
    f.done()
    return job


def _point(f: ProfileFields) -> Point:
    point = Point(
        task=f.text("task"),
        batch=f.whole("batch", 1),
        iter_s=f.number("iter_s", 0),
        accumulation=f.whole("accumulation", 1, default=f.whole("accum", 1, default=1)),
        gpus=f.whole("gpus", 1, default=1),
        nodes=f.whole("nodes", 1, default=1),
        memory_bytes=f.maybe("memory_bytes", lambda key: f.whole(key, 0)),
        source=f.maybe("source", f.text),
    )
    f.done()
    return point


def _mechanism(f: ProfileFields) -> str:
    return _known_mechanism(f.text("mechanism"), f)


def _known_mechanism(mechanism: str, f: ProfileFields) -> str:
    if mechanism not in MECHANISMS:
        f.fail("mechanism", f"unknown {mechanism!r}; give {', '.join(MECHANISMS)}")
    return mechanism


def _xi(f: ProfileFields, key: str) -> float:
    """Read ξ. A measured ξ may be a little below 1 (noise; the core treats it as 1), but never 0."""
    xi = f.number(key, 0)
    if xi == 0:
        f.fail(key, "0 is not a slow-down; give 1 for a job that is not slowed down")
    return xi


def _interval(f: ProfileFields, key: str) -> Interval:
    ends = f.numbers(key, 0)
    if len(ends) != 2 or ends[0] > ends[1]:
        f.fail(key, "not an interval; give [low, high]")
    return ends[0], ends[1]


def dumps(profile: Profile) -> str:
    """Return the file's text, indented, with one line for each pair, group and point."""
    parts = [f' "schema": {SCHEMA}']
    values = {
        **_bare(asdict(replace(profile, raw=()))),
        **({"raw": list(map(plain, profile.raw))} if profile.raw else {}),
    }
    for key, value in values.items():
        if key in ("pairs", "groups", "points", "raw"):
            lines = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value)
            parts.append(f' "{key}": [\n  {lines}\n ]')
        else:
            text = json.dumps(value, ensure_ascii=False, indent=1)
            parts.append(f' "{key}": ' + text.replace("\n", "\n "))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _bare(value: Any) -> Any:
    """Remove optional fields that are empty."""
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items() if inner is not None and inner not in ({}, [], ())}
    return [_bare(inner) for inner in value] if isinstance(value, list | tuple) else value


def save(profile: Profile, path: str | Path) -> None:
    """Write the file atomically."""
    with whole_file(path) as file:
        file.write(dumps(profile))
