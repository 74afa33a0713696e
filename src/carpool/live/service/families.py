"""Which jobs are alike: the family of a job, from what it runs instead of what it is called.

A family is the content of the script and those of its arguments that change how it uses a GPU. The service asks for it
when a job is submitted, and the belief keeps under it what it learns, so that what was learned from `run-16` counts for
`run-17`. The rules are in docs/explanation/belief.md. Nothing here raises: an unreadable script counts by its path.
"""

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from itertools import takewhile

from carpool.belief.pairs import SCRIPT
from carpool.job_schema import Spec

MOST_BYTES = 2**20
"""Size up to which the content of a file counts; of a larger one, its name and size do."""
SEARCHED_BYTES = 2**16
"""Size of the part of a script in which a training is looked for: a search stops all other threads."""
PYTHON = re.compile(r"python[0-9.]*$")
SCRIPTS = (".py", ".sh")
CODE = (*SCRIPTS, ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".ipynb")
"""Endings of files among the arguments whose content counts: scripts and configurations, not data."""
NEUTRAL = re.compile(
    "PATH$|LANG|LC_|LD_|HOME$|USER|LOGNAME|SHELL$|TERM|TZ$|TMP|TEMP|XDG_|CONDA|VIRTUAL_ENV|PYTHON|HF_|WANDB_|MLFLOW_"
)
"""Beginnings of variables that say where things are, not what the job does."""
FRAMEWORK = re.compile(
    rb"^[ \t]*(?:import|from)[ \t]+(?:torch|transformers|lightning|pytorch_lightning|accelerate|carpool)\b", re.M
)
STEPS = re.compile(rb"\.step\(|\bTrainer\b|\bcarpool\.(?:train|Training)\b")
"""What a training calls: an optimizer's step, a framework's trainer, or the training library."""
UNWATCHED = re.compile(r"-[A-Za-z]*[IES]")
"""Options of Python with which a process is not watched."""
_RUN = (
    "seed|run|name|id|uuid|exp|experiment|project|group|entity|tag|tags|notes?|trial|fold|date|time|version|user|out|"
    "output|outdir|save|saves?dir|dir|logs?|logdir|logger|logging|checkpoints?|ckpt|resume|results?|report|cache|tmp|"
    "port|host|hostname|addr|address|rank|device|devices|gpu|gpus|cuda|wandb|tensorboard|verbose|quiet|debug|print"
)
_HYPER = (
    "lr|lrs|rate|wd|decay|momentum|beta|betas|beta1|beta2|eps|epsilon|gamma|alpha|lambda|temperature|warmup|schedule|"
    "scheduler|dropout|smoothing|clip|clipping|norm|margin|patience|reg"
)
_LENGTH = "epochs?|steps?|iterations?|iters?|updates|duration|limit|total|max|data|dataset|datadir|train|val|samples"
RUN_WORD, HYPER_WORD, LENGTH_WORD = (re.compile(f"(?:{words})$") for words in (_RUN, _HYPER, _LENGTH))


@dataclass(frozen=True, slots=True)
class Family:
    """What a job is, as far as the belief is concerned."""

    name: str
    """Name of the family: jobs of one name slow others down, and are slowed down, alike."""
    length: str
    """What decides how long a job of the family takes but not how fast; jobs of one length take equally long."""

    def model(self, counted: bool) -> str:
        """Return the model under which the belief keeps speeds. Where the owner gave no number of iterations, a speed
        is a duration, which the length decides as well."""
        return self.name if counted or not self.length else f"{self.name}/{self.length}"


def family_of(spec: Spec) -> Family | None:
    """Return the family of a job; None: its command does not identify one."""
    if not spec.command:
        return None
    label, kept, length = _read_command(spec)
    for key, value in sorted(spec.env.items()):
        if NEUTRAL.match(key):
            continue
        _sort_option(key, value, spec.directory, kept, length)
    return Family(f"{SCRIPT}{label}:{_hash(kept)}", _hash(length)[:8] if length else "")


def _read_command(spec: Spec) -> tuple[str, list[str], list[str]]:
    """Return the name of what a command runs, the parts of it that count, and those that decide its length."""
    program, *rest = spec.command
    label, kept, length = os.path.basename(program), [], list[str]()
    if PYTHON.match(label) or os.path.basename(program) in ("env", "bash", "sh"):
        label = PYTHON.sub("python", label)
        kept.append(label)
    else:
        kept.append(_content(program, spec.directory) if "/" in program else label)
    scripted, left = False, rest[::-1]
    while left:
        argument = left.pop()
        if argument in ("-m", "-c") and not scripted:  # a module, or code
            text = left.pop() if left else ""
            kept += [argument, text]
            label, scripted = (text if argument == "-m" else f"{label} -c"), True
        elif argument.endswith(CODE) and not scripted and not argument.startswith("-"):
            label, scripted = os.path.basename(argument), True
            kept.append(_content(argument, spec.directory))
        elif _is_option(argument):
            key, equals, value = argument.partition("=")
            script_next = bool(left) and not scripted and left[-1].endswith(SCRIPTS)  # as in `python -u train.py`
            if not equals and left and not script_next and not _is_option(left[-1]):
                value = left.pop()
            _sort_option(key, value, spec.directory, kept, length)
        else:
            _sort_option("", argument, spec.directory, kept, length)
    return re.sub(r"[^\w.+-]", "_", label)[:60], kept, length


def _is_option(argument: str) -> bool:
    """Return whether an argument is an option, such as --width, --width=7 or model.width=7."""
    return "=" in argument or (argument.startswith("-") and not _is_number(argument))


def _sort_option(key: str, value: str, directory: str, kept: list[str], length: list[str]) -> None:
    """Add an option to what counts or to what decides the length, or leave it out."""
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1-\2", key).lower()) if word]
    last = words[-1] if words else ""
    numeric = _is_number(value) or value == ""
    if any(RUN_WORD.match(word) for word in (*words[:1], last)):
        return
    if numeric and HYPER_WORD.match(last) and not any(word in ("batch", "layer") for word in words):
        return
    if (LENGTH_WORD.match(last) or (words and LENGTH_WORD.match(words[0]))) and not _sizes(words):
        length.append(f"{key}={value}")
    elif value.endswith(CODE):
        kept.append(f"{key}={_content(value, directory)}")
    elif "/" in value:
        length.append(f"{key}={value}")  # data, most likely
    else:
        kept.append(f"{key}={value}")


def _sizes(words: list[str]) -> bool:
    """Return whether an option is about the size of a model or a batch, such as max-seq-length."""
    return any(word in ("batch", "seq", "length", "len", "size", "width", "tokens", "accumulation") for word in words)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_training(spec: Spec) -> bool:
    """Return whether a job's script imports a framework whose steps are watched, and makes steps itself.

    A script that only uses a model, and one whose loop is elsewhere, do not count.
    """
    before = list(takewhile(lambda word: not word.endswith(".py"), spec.command))
    if len(before) == len(spec.command) or any(UNWATCHED.match(word) for word in before):
        return False
    text = _read(spec.command[len(before)], spec.directory)
    if not isinstance(text, bytes):
        return False
    return bool(FRAMEWORK.search(text, 0, SEARCHED_BYTES)) and bool(STEPS.search(text, 0, SEARCHED_BYTES))


def _content(path: str, directory: str) -> str:
    """Return a file's content as a hash; of a large one its name and size, of one that cannot be read its path."""
    found = _read(path, directory)
    if found is None:
        return f"path:{path}"
    if isinstance(found, int):
        return f"size:{os.path.basename(path)}:{found}"
    return hashlib.sha256(found).hexdigest()


def _read(path: str, directory: str) -> bytes | int | None:
    """Return a file's content; of a large one its size, of one that cannot be read nothing."""
    try:
        handle = os.open(os.path.join(directory, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return None
        return found.st_size if found.st_size > MOST_BYTES else os.read(handle, MOST_BYTES)
    except OSError:
        return None
    finally:
        os.close(handle)


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:12]
