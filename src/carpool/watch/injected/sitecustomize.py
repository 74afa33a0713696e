"""Runs at the start of every Python process of a watched job. carpool/watch/__init__.py says what for.

This file must run on every Python 3, import nothing that Python has not imported at its start, and never fail.
"""

import os
import sys

_WATCHED = {
    "torch.optim.optimizer",
    "transformers.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
}


class _Finder:
    """Notices the import of PyTorch's optimizers and of the frameworks' trainers, and lets them be watched."""

    def find_spec(self, name, path=None, target=None):
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                _attach_after(spec.loader)
                return spec
        return None


def _attach_after(loader):
    load = loader.exec_module

    def load_and_attach(module):
        load(module)
        try:
            _steps().attach(module)
        except Exception:
            return  # the job is not watched

    try:
        loader.exec_module = load_and_attach
    except Exception:  # a loader that takes no attributes
        return


def _steps():
    """Return the module carpool/watch/steps.py, loaded by its path."""
    name = "_carpool_watch_steps"
    if name not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, os.path.join(os.path.dirname(_HERE), "steps.py"))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _run_hidden():
    """Import the sitecustomize that Python would have imported without this one."""
    sys.path[:] = [place for place in sys.path if place != _HERE]
    own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault(__name__, own)


_HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("CARPOOL_WORKER_DIR"):
    sys.meta_path.insert(0, _Finder())
_run_hidden()
