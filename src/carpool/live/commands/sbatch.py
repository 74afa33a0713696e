"""Batch scripts of Slurm: what `carpool submit train.sh` reads from the `#SBATCH` lines of a script.

GPUs, time, requeue, array, dependency, name, account (the project), output, directory, cores and memory are understood.
Everything else is named as ignored, so that no user relies on it. The time limit of a script is that of the job, and
its expected duration as well.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.errors import InputError
from carpool.live.spec import SUBMIT_VARIABLE

SUFFIXES = (".sh", ".sbatch", ".slurm", ".batch")
MAX_BYTES = 1 << 20
SHORT = {
    "-G": "--gpus",
    "-t": "--time",
    "-a": "--array",
    "-d": "--dependency",
    "-J": "--job-name",
    "-A": "--account",
    "-o": "--output",
    "-e": "--error",
    "-D": "--chdir",
    "-c": "--cpus-per-task",
}
PLACES = {
    "%j": "${CARPOOL_JOB}",
    "%A": "${CARPOOL_ARRAY_JOB:-${CARPOOL_JOB}}",
    "%a": "${CARPOOL_ARRAY_INDEX}",
    "%t": "${RANK}",
    "%%": "%",
}
"""What Slurm's patterns in the names of output files stand for. The id of an array is that of its first job."""


@dataclass
class BatchScript:
    """The fields of a job, as a job file has them, and the options of the script that mean nothing here."""

    fields: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    error: str = ""
    ignored: list[str] = field(default_factory=list)


def is_batch_script(word: str) -> bool:
    """Return whether the first word of a command is a script with `#SBATCH` lines, or the bare name of one in this
    folder, which is no program: a shell does not run it, but `sbatch` does."""
    path = Path(word)
    if path.suffix not in SUFFIXES or not path.is_file():
        return False
    if "/" not in word and shutil.which(word) is None:
        return True
    return any(_options_of(line) is not None for line in _head(path))


def read(path: Path, arguments: Sequence[str] = (), name: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of the job that a script asks for, and the options that were ignored. `name`: one that is given
    with the script, which takes precedence."""
    script = BatchScript({"directory": str(Path.cwd())})
    lines = _head(path)
    for number, line in enumerate(lines, start=1):
        words = _options_of(line)
        if words is not None:
            try:
                _read_options(script, words)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: {error}") from None
    script.fields["name"] = name or script.fields.get("name", path.stem)
    shebang = shlex.split(lines[0][2:]) if lines and lines[0].startswith("#!") else ["/bin/sh"]
    command = [*shebang, str(path.absolute()), *arguments]
    script.fields["command"] = _redirected(command, script) if script.output or script.error else command
    script.fields["env"] = {"SLURM_JOB_NAME": script.fields["name"], SUBMIT_VARIABLE: str(Path.cwd())}
    return script.fields, script.ignored


def _head(path: Path) -> list[str]:
    """Return the lines of a script before its first command: Slurm reads options only there."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return []
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    found = []
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        found.append(line)
    return found


def _options_of(line: str) -> list[str] | None:
    match = re.match(r"#SBATCH\s+(.*)", line)
    if match is None:
        return None
    return shlex.split(match[1], comments=True)


def _read_options(script: BatchScript, words: list[str]) -> None:
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if word[:2] in SHORT and not word.startswith("--") and len(word) > 2 and not equals:
            name, value = word[:2], word[2:]
        name = SHORT.get(name, name)
        if not equals and name in FLAGS:
            FLAGS[name](script)
            continue
        reader = READERS.get(name)
        if reader is None:
            follows = bool(waiting) and not waiting[0].startswith("-")
            script.ignored.append(f"{word} {waiting.pop(0)}" if not equals and follows else word)
            continue
        if not value:
            if not waiting:
                raise ValueError(f"{name}: has no value")
            value = waiting.pop(0)
        reader(script, value)


def _gpus(script: BatchScript, value: str) -> None:
    script.fields["gpus"] = _number("--gpus", value.rpartition(":")[2])


def _gres(script: BatchScript, value: str) -> None:
    for part in value.split(","):
        kind, *rest = part.split(":")
        if kind != "gpu":
            script.ignored.append(f"--gres={part}")
        else:
            script.fields["gpus"] = _number("--gres", rest[-1]) if rest and rest[-1].isdigit() else 1


def _number(option: str, text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{option}: {text!a} is not a whole number")
    return int(text)


def _time(script: BatchScript, value: str) -> None:
    """Read minutes, minutes:seconds, hours:minutes:seconds, or days before a minus and hours after it."""
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", value)
    if match is None:
        raise ValueError(f"--time: {value!a} must be minutes, or a time such as 1-12:30:00")
    days, *rest = (int(part) if part else None for part in match.groups())
    parts = [part for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) == 2 else 0
    total = ((days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds
    if total:  # 0 means no limit to Slurm
        script.fields["duration"] = script.fields["limit"] = total


def _set_flag(name: str, value: bool) -> Callable[[BatchScript], None]:
    def reader(script: BatchScript) -> None:
        script.fields[name] = value

    return reader


def _array(script: BatchScript, value: str) -> None:
    indexes, percent, most = value.partition("%")
    if percent:
        script.ignored.append(f"%{most} of --array")
    found = []
    for part in indexes.split(","):
        span, _, step = part.partition(":")
        if not step:
            found.append(span)
            continue
        first, _, last = span.partition("-")
        numbers = [_number("--array", text) for text in (first, last, step)]
        found += map(str, range(numbers[0], numbers[1] + 1, max(1, numbers[2])))
    script.fields["array"] = ",".join(found)


def _dependency(script: BatchScript, value: str) -> None:
    for part in re.split("[,?]", value):
        kind, *jobs = part.split(":")
        if kind == "afterok" and jobs:
            script.fields.setdefault("after", []).extend(job.partition("+")[0] for job in jobs)
        else:
            script.ignored.append(f"--dependency={part}")


def _memory(script: BatchScript, value: str) -> None:
    match = re.fullmatch(r"(\d+)([KMGT]?)", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"--mem: {value!a} must be a size such as 16G")
    if int(match[1]):  # 0 means all of the node's memory to Slurm
        script.fields["memory"] = f"{match[1]}{(match[2] or 'M').upper()}iB"


def _set(name: str, read: Callable[[str], Any] = str) -> Callable[[BatchScript, str], None]:
    def reader(script: BatchScript, value: str) -> None:
        script.fields[name] = read(value)

    return reader


def _output(script: BatchScript, value: str) -> None:
    script.output = value


def _error(script: BatchScript, value: str) -> None:
    script.error = value


READERS: dict[str, Callable[[BatchScript, str], None]] = {
    "--gpus": _gpus,
    "--gpus-per-node": _gpus,
    "--gres": _gres,
    "--time": _time,
    "--array": _array,
    "--dependency": _dependency,
    "--job-name": _set("name"),
    "--account": _set("project"),
    "--output": _output,
    "--error": _error,
    "--chdir": _set("directory", lambda text: str(Path(text).expanduser().absolute())),
    "--cpus-per-task": _set("cpus", lambda text: _number("--cpus-per-task", text)),
    "--mem": _memory,
}
"""How the value of each option is read."""
FLAGS = {"--requeue": _set_flag("requeue", True), "--no-requeue": _set_flag("requeue", False)}
"""What options without a value say."""


def _redirected(command: list[str], script: BatchScript) -> list[str]:
    """Return a command whose output goes to the files that the script names, with Slurm's patterns filled in."""
    name = script.fields["name"]

    def file(pattern: str) -> str:
        parts = re.split(r"(%[jAatx%])", pattern)
        shown = [name if part == "%x" else part for part in parts]
        return "".join(PLACES[part] if part in PLACES else shlex.quote(part) for part in shown if part)

    where = f"exec >{file(script.output)}" if script.output else ""
    where += " 2>&1" if where and not script.error else ""
    where += f"{' ' if where else 'exec '}2>{file(script.error)}" if script.error else ""
    return ["/bin/sh", "-c", f'{where}; exec "$@"', "sh", *command]
