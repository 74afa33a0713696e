"""The table of policies, and how to make one from what a user writes: `name`, `name:key=value,…`, `file.py:Class`.

There are three ways to add a policy, a class derived from `carpool.policies.base.BasePolicy`:
- built in: write a file in a family folder, import its class here and add it to `_CLASSES`;
- in a package: offer it through the entry-point group `carpool.policies` (name = module:Class);
- in a file of your own: name it as `path/to/file.py:Class`. Nothing needs to be installed.
"""

import re
import sys
from dataclasses import MISSING, Field, dataclass, fields
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from carpool.core.scheduler import Policy
from carpool.errors import InputError, nearest
from carpool.policies.base import BasePolicy
from carpool.policies.joint.policy import Carpool
from carpool.policies.pollux.policy import Pollux
from carpool.policies.preemptive.las import Las
from carpool.policies.preemptive.srsf import Srsf
from carpool.policies.preemptive.srtf import Srtf
from carpool.policies.preemptive.tiresias import Tiresias
from carpool.policies.sharing.bsbf import SjfBsbf
from carpool.policies.sharing.ffs import SjfFfs
from carpool.policies.sharing.lucid import Lucid
from carpool.policies.sharing.tesserae import Tesserae
from carpool.policies.simple.backfill import Backfill
from carpool.policies.simple.fifo import Fifo
from carpool.policies.simple.sjf import Sjf

_CLASSES: tuple[type[BasePolicy], ...] = (
    # the paper's policies
    Fifo,
    Sjf,
    Tiresias,
    SjfFfs,
    SjfBsbf,
    Pollux,
    # the joint rule
    Carpool,
    # further baselines
    Backfill,
    Srtf,
    Srsf,
    Las,
    Lucid,
    Tesserae,
)
BUILT_IN: dict[str, type[BasePolicy]] = {cls.name: cls for cls in _CLASSES}
"""The built-in policies by name, in the order in which `carpool policies` shows them."""
ENTRY_POINTS = "carpool.policies"
"""Entry-point group in which installed packages offer policies."""
REQUIRED = object()
"""Marker for an option without a default."""
MAX_NUMBER = 1e12
"""Largest number that an option accepts."""


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """One option of a policy, as users see it."""

    name: str
    default: Any
    help: str


def known() -> dict[str, type[Any] | InputError]:
    """Return all policies that can be named, built in or from packages; an error stands for one that does not load."""
    found: dict[str, type[Any] | InputError] = dict(BUILT_IN)
    for name, point in _added().items():
        try:
            found[name] = _from_entry_point(point)
        except InputError as error:
            found[name] = error
    return found


def _added() -> dict[str, EntryPoint]:
    """Return what installed packages offer, without loading it. A built-in policy keeps its name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in BUILT_IN}


def _from_entry_point(point: EntryPoint) -> type[Any]:
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:
        problem = f"does not load: {type(error).__name__}: {error}; fix or remove its package"
        raise InputError(f"policy {point.name} (entry point {point.value}) {problem}") from error
    if not isinstance(cls, type):
        raise InputError(f"policy {point.name} (entry point {point.value}) is not a class; fix or remove its package")
    return cls


def summary(cls: type[Any]) -> str:
    """Return the first line of a policy's docstring."""
    return (cls.__doc__ or "").strip().split("\n")[0]


def options(cls: type[Any]) -> list[PolicyOption]:
    """Return a policy's options: the fields of its dataclass."""
    try:
        own = fields(cls)
    except TypeError:
        return []
    shown = [field for field in own if field.init and not field.name.startswith("_")]
    return [PolicyOption(field.name, _default(field), field.metadata.get("help", "")) for field in shown]


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else REQUIRED


def make(text: str) -> Policy:
    """Make a policy from what a user wrote."""
    cls: type[Any]
    file = re.match(r"(?P<path>[^=]*?\.py)(?:$|:(?P<cls>[^:]*):?(?P<rest>.*))", text.strip(), re.DOTALL)
    if file:
        name, rest = file["path"], file["rest"] or ""
        cls = _from_file(Path(name), file["cls"] or "")
    else:
        name, _, rest = text.strip().partition(":")
        cls = _named(name)
    try:
        policy = cls(**_parse(name, rest, options(cls)))
    except TypeError as error:
        raise InputError(f"policy {text!r} cannot be made: {error}; its options need defaults") from error
    for method in ("key", "decide", "wake"):
        if not callable(getattr(policy, method, None)):
            raise InputError(
                f"policy {text!r} has no method {method}(); derive it from carpool.policies.base.BasePolicy"
            )
    if not isinstance(getattr(policy, "restart_s", None), int | float):
        raise InputError(f"policy {text!r} has no number restart_s; derive it from carpool.policies.base.BasePolicy")
    return policy  # type: ignore[no-any-return]


def _named(name: str) -> type[Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    added = _added()
    if name not in added:
        raise InputError(f"unknown policy {name!r}: {nearest(name, [*BUILT_IN, *added])}")
    return _from_entry_point(added[name])


def _from_file(path: Path, class_name: str) -> type[Any]:
    if not path.is_file():
        raise InputError(f"policy file {path} does not exist; give path/to/file.py:Class")
    if not class_name:
        raise InputError(f"name the class too: {path}:ClassName")
    spec = spec_from_file_location(f"carpool_policy_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve annotations there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"policy file {path} does not load: {type(error).__name__}: {error}; fix it") from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        classes = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise InputError(f"{path} has no class {class_name!r}: {nearest(class_name, classes)}")
    return cls


def _parse(policy: str, text: str, allowed: list[PolicyOption]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    by_name = {option.name: option for option in allowed}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(f"option {part!r} of policy {policy}: write it as key=value")
        if key not in by_name:
            hint = nearest(key, by_name) if by_name else "it has none"
            raise InputError(f"unknown option {key!r} of policy {policy}: {hint}")
        if key in values:
            raise InputError(f"option {key!r} of policy {policy} is given twice; give it once")
        values[key] = _convert(policy, key, value, by_name[key].default)
    return values


def _convert(policy: str, key: str, value: str, default: Any) -> Any:
    if isinstance(default, bool):
        if value.lower() in ("true", "yes", "1"):
            return True
        if value.lower() in ("false", "no", "0"):
            return False
        raise InputError(f"option {key} of policy {policy}: {value!r} must be true or false")
    if isinstance(default, int | float):
        try:
            number = type(default)(value)
        except ValueError:
            number = -1
        if not 0 <= number <= MAX_NUMBER:
            kind = "whole number" if isinstance(default, int) else "number"
            raise InputError(f"option {key} of policy {policy}: {value!r} must be a {kind} from 0 to {MAX_NUMBER:g}")
        return number
    return value
