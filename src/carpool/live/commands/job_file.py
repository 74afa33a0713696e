"""Job files: what `carpool submit FILE.yaml` or `FILE.toml` reads. The fields are the options of `carpool submit`.

```yaml
name: resnet
command: python train.py --lr 0.1
gpus: 2
batch_size: 64
iterations: 20000
```
"""

import shlex
import tomllib
from pathlib import Path
from typing import Any

from carpool.errors import InputError, nearest
from carpool.live.text import duration
from carpool.units import parse_bytes

SUFFIXES = (".yaml", ".yml", ".toml")
MOST_BYTES = 1 << 20
ALIASES = {"batch_size": "batch", "time": "time_s", "grace": "grace_s"}
FIELDS = (
    *(
        "command",
        "directory",
        "gpus",
        "batch_size",
        "iterations",
        "model",
        "name",
        "env",
        "time",
        "priority",
        "exclusive",
    ),
    *("max_slowdown", "after", "retries", "can_shrink", "cpus", "memory", "grace", "array", "snapshot"),
)


def read(path: Path) -> dict[str, Any]:
    """The file's fields under the names that the API uses. Relative directories start where the file lies."""
    data = _load(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: must hold fields such as `command: python train.py`")
    fields: dict[str, Any] = {}
    for key, value in data.items():
        if key not in FIELDS:
            raise InputError(f"{path}: {ascii(key)[:60]}: no such field; {nearest(str(key), FIELDS)}")
        if value is not None:
            fields[ALIASES.get(str(key), str(key))] = _field(path, key, value)
    directory = path.parent / Path(str(fields.get("directory", "."))).expanduser()
    fields["directory"] = str(directory.absolute())
    return fields


def _load(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: is larger than a job file can be ({MOST_BYTES >> 20} MiB)")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InputError(f"{path}: {why}") from None
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        import yaml

        return yaml.safe_load(text)
    except ModuleNotFoundError:
        raise InputError(f"{path}: YAML needs an extra: pip install 'carpool[live]'; TOML works without") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {_first_line(error)}") from None
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise InputError(f"{path}: {_first_line(error)}") from None
        raise


def _first_line(error: BaseException) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + str(getattr(error, "problem", None) or str(error) or type(error).__name__).splitlines()[0]


def _field(path: Path, key: str, value: Any) -> Any:
    if key == "command" and isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise InputError(f"{path}: command: {error}; close the quotes, or write a list of words") from None
    if key in ("time", "grace") and isinstance(value, str):
        return duration(value, f"{path}: {key}")
    if key == "memory" and isinstance(value, str):
        return parse_bytes(value, f"{path}: memory")
    if key == "after":
        return [_job(path, job) for job in (value if isinstance(value, list) else [value])]
    if key == "array" and isinstance(value, int):
        return str(value)
    if key == "snapshot" and not isinstance(value, bool):
        raise InputError(f"{path}: snapshot: must be true or false")
    if key == "env":
        if not isinstance(value, dict):
            raise InputError(f"{path}: env: must map names to values, as in `env: {{SEED: 3}}`")
        return {str(name): _env_text(path, str(name), text) for name, text in value.items()}
    return value


def _job(path: Path, value: Any) -> str:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise InputError(f"{path}: after: {ascii(value)[:40]} is no job's id; write `after: [3, 5]`")
    return str(value)


def _env_text(path: Path, name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{path}: env: {name}: must be text; put quotes around it")
    return str(value)
