"""Job files: what `carpool submit FILE.yaml` or `FILE.toml` reads. The fields are those of `carpool.job_schema`.

```yaml
name: resnet
command: python train.py --lr 0.1
gpus: 2
batch: 64
iterations: 20000
```
"""

from pathlib import Path
from typing import Any

from carpool import job_schema
from carpool.errors import InputError
from carpool.fields import read_toml_text
from carpool.job_schema import FIELDS, JobField

SUFFIXES = (".yaml", ".yml", ".toml")
MAX_BYTES = 128 << 10
"""Size of the largest job file. Reading YAML of this size takes a second or two."""


def read(path: Path, among: tuple[JobField, ...] = FIELDS) -> dict[str, Any]:
    """Return the file's fields as the HTTP request has them. Relative directories start at the file's own directory."""
    data = _load(path)
    if isinstance(data, dict) and isinstance(data.get("directory"), str):
        data = {**data, "directory": str((path.parent / Path(data["directory"]).expanduser()).absolute())}
    elif isinstance(data, dict):
        data = {"directory": str(path.parent.absolute()), **data}
    return job_schema.request_of(data, str(path), among)


def _load(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: is larger than {MAX_BYTES >> 10} KiB; a job file holds only a job's fields")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        remedy = "give a YAML or TOML file, or a command after `--`"
        raise InputError(f"{path}: there is no such job file; {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InputError(f"{path}: {why}") from None
    try:
        if path.suffix == ".toml":
            return read_toml_text(text)
        return _load_yaml(text)
    except ModuleNotFoundError:
        raise InputError(f"{path}: YAML needs an extra: pip install 'carpool[live]'; TOML works without") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {_first_line(error)}") from None
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise InputError(f"{path}: {_first_line(error)}") from None
        raise


def _load_yaml(text: str) -> Any:
    """Return the contents of a YAML text. A name that is there twice is refused, which YAML leaves to its reader."""
    import yaml

    class UniqueLoader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.value != "<<"]
            for number, key in enumerate(keys):
                if key in keys[:number]:
                    mark = node.value[number][0].start_mark
                    raise yaml.constructor.ConstructorError(None, None, f"{key!a} is there twice; remove one", mark)
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    return yaml.load(text, Loader=UniqueLoader)


def _first_line(error: BaseException) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + str(getattr(error, "problem", None) or str(error) or type(error).__name__).splitlines()[0]
