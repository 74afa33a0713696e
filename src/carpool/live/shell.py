"""What a job gets of the shell from which it was submitted, so that it runs there as it would run here.

The program is looked up here, and the variables below travel: the active environment, where programs and libraries are
found, and the settings of the usual libraries. Names and values that look like secrets never travel; `--env NAME`
passes one on. `submit --clean-env` sends nothing.
"""

import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from carpool.field_types import MAX_TEXT, RESERVED_PREFIX, RESERVED_VARIABLES

NAMES = (
    "PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "LANG",
    "TZ",
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
)
"""Variables that travel."""
PREFIXES = (
    "PYTHON",
    "LC_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "CUBLAS_",
    "CUDNN_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "WANDB_",
    "MLFLOW_",
    "JAX_",
    "XLA_",
    "TF_",
)
"""Beginnings of names of variables that travel."""
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE|WEBHOOK", re.IGNORECASE)
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")
"""An address with a user's name and password in it."""


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a shell that a job gets."""
    found = {}
    for name, value in sorted(environ.items()):
        if not (name in NAMES or name.startswith(PREFIXES)) or not re.fullmatch(r"\w{1,200}", name, re.ASCII):
            continue
        if name.startswith(RESERVED_PREFIX) or name in RESERVED_VARIABLES:
            continue
        if SECRET_NAME.search(name) or SECRET_VALUE.search(value) or len(value) > MAX_TEXT or not _is_text(value):
            continue
        found[name] = _absolute(value) if name == "PATH" else value
    return found


def _is_text(value: str) -> bool:
    """Return whether JSON can hold the value: a variable may have bytes that are no text."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _absolute(path: str) -> str:
    """Return a search path without the folders that mean another place elsewhere."""
    return os.pathsep.join(folder for folder in path.split(os.pathsep) if folder.startswith("/"))


def find_program(word: str, environ: Mapping[str, str]) -> str | None:
    """Return the program that a shell would run for the first word of a command; None: there is none.

    A word with a slash is a path already. Links are kept: the Python of a virtual environment is one.
    """
    if "/" in word:
        return word
    return shutil.which(word, path=_absolute(environ.get("PATH", os.defpath)))


def run_as_here(request: dict[str, Any]) -> str:
    """Let the job of a request run as it would here. What the request says already stays.

    Return a warning if its program is not found here; empty: it is.
    """
    request["env"] = {**travelling(os.environ), **request.get("env", {})}
    program, *arguments = request["command"]
    found = find_program(program, request["env"])
    request["command"] = [found or program, *arguments]
    return "" if found else f"{ascii(program)[:80]} is not in your PATH; the job looks for it there"
