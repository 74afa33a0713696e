"""Watching a PyTorch job without a line of its code: iterations, speed and peak memory of an unmodified script.

The executor puts `injected` in front of the job's `PYTHONPATH`. Python imports the `sitecustomize` there at its start.
It runs the `sitecustomize` that it hides, and waits until the job imports `torch.optim.optimizer`. Then `steps`
registers PyTorch's own hook for the steps of all optimizers, and reports through `carpool.channel` as the training
library does.

The job's interpreter need not have Carpool installed: both files are loaded by their path. An error in them has no
effect on the job, except that it is not watched. `carpool submit --no-watch` leaves the job alone.
"""

from pathlib import Path

INJECTED = Path(__file__).parent / "injected"
"""The folder for the job's `PYTHONPATH`."""
