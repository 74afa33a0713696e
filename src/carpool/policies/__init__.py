"""The policies by name, and how to make one from what a person writes: `name`, `name:key=value,…`, `file.py:Class`.

A package adds policies of its own through the entry-point group `carpool.policies` (name = module:Class).
"""

from dataclasses import MISSING, Field, dataclass, fields
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from carpool.core.scheduler import Policy
from carpool.errors import InputError, nearest
from carpool.policies.base import BasePolicy
from carpool.policies.bsbf import SjfBsbf
from carpool.policies.ffs import SjfFfs
from carpool.policies.fifo import Fifo
from carpool.policies.sjf import Sjf
from carpool.policies.tiresias import Tiresias

BUILT_IN: dict[str, type[BasePolicy]] = {cls.name: cls for cls in (Fifo, Sjf, Tiresias, SjfFfs, SjfBsbf)}
ENTRY_POINTS = "carpool.policies"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a policy, as shown to people."""

    name: str
    default: Any
    help: str


def known() -> dict[str, type[Any]]:
    """All policies that can be named, built in or added by installed packages."""
    found: dict[str, type[Any]] = dict(BUILT_IN)
    for point in entry_points(group=ENTRY_POINTS):
        try:
            found.setdefault(point.name, point.load())
        except Exception as error:
            raise InputError(f"policy {point.name} of entry point {point.value} does not load: {error}") from error
    return found


def summary(cls: type[Any]) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]


def options(cls: type[Any]) -> list[Option]:
    """A policy's options: the fields of its dataclass."""
    try:
        own = fields(cls)
    except TypeError:
        return []
    return [Option(f.name, _default(f), f.metadata.get("help", "")) for f in own if not f.name.startswith("_")]


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def make(text: str) -> Policy:
    """A policy from its specification."""
    name, _, rest = text.strip().partition(":")
    if name.endswith(".py"):
        class_name, _, rest = rest.partition(":")
        cls = _from_file(Path(name), class_name)
    elif name in BUILT_IN:
        cls = BUILT_IN[name]
    else:
        names = known()
        if name not in names:
            raise InputError(f"unknown policy {name!r}: {nearest(name, names)}")
        cls = names[name]
    policy = cls(**_parse(name, rest, options(cls)))
    for method in ("key", "decide", "wake"):
        if not callable(getattr(policy, method, None)):
            raise InputError(f"policy {text!r} has no method {method}(): see docs/policies.md")
    return policy  # type: ignore[no-any-return]


def _from_file(path: Path, class_name: str) -> type[Any]:
    if not path.is_file():
        raise InputError(f"policy file {path} does not exist")
    if not class_name:
        raise InputError(f"name the class too: {path}:ClassName")
    spec = spec_from_file_location(f"carpool_policy_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"policy file {path} does not load: {type(error).__name__}: {error}") from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise InputError(f"{path} has no class {class_name!r}: {nearest(class_name, classes)}")
    return cls


def _parse(policy: str, text: str, allowed: list[Option]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    by_name = {option.name: option for option in allowed}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"option {part!r} of policy {policy}: write it as key=value")
        if key not in by_name:
            hint = nearest(key, by_name) if by_name else "it has none"
            raise InputError(f"unknown option {key!r} of policy {policy}: {hint}")
        values[key] = _convert(policy, key, value, by_name[key].default)
    return values


def _convert(policy: str, key: str, value: str, default: Any) -> Any:
    if isinstance(default, bool):
        if value.lower() in ("true", "yes", "1"):
            return True
        if value.lower() in ("false", "no", "0"):
            return False
        raise InputError(f"option {key} of policy {policy}: {value!r} is neither true nor false")
    if isinstance(default, int | float):
        try:
            number = type(default)(value)
        except ValueError:
            number = -1
        if not 0 <= number < float("inf"):
            raise InputError(f"option {key} of policy {policy}: {value!r} is not a number ≥ 0")
        return number
    return value
