"""A training of one process without torch: it counts, saves when it is asked to, and goes on from what it saved.

    python saving_job.py STEPS [--bulk BYTES]

Its result is a chain of hashes over all its steps, so that only a run that goes on exactly where it stopped gives the
same one.
"""

import argparse
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

from carpool.channel import ENV_CHECKPOINTS, ENV_DIRECTORY, EXIT_STOPPED, ControlReader, Report, ReportWriter

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--bulk", type=int, default=0)
args = parser.parse_args()
folder = Path(os.environ[ENV_CHECKPOINTS])
reader, writer = ControlReader(os.environ[ENV_DIRECTORY]), ReportWriter(os.environ[ENV_DIRECTORY])
state, step, saved = "", 0, -1
if (folder / "last").is_symlink():
    step, state = (folder / "last" / "state").read_text().split()
    step = saved = int(step)
print(f"from {step} in {os.environ['CARPOOL_GPUS']}", flush=True)
while step < args.steps:
    step += 1
    state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    time.sleep(0.05)
    if step % 5 == 0:
        print(f"step {step}", flush=True)
    control = reader.read()
    writer.write(Report(attempt=int(os.environ["CARPOOL_ATTEMPT"]), iteration=step, seconds=0.05, checkpoint=saved))
    if control.stop:
        place = folder / f"step-{step}"
        place.mkdir()
        (place / "state").write_text(f"{step} {state}")
        (place / "weights").write_bytes(os.urandom(args.bulk))
        (folder / "last").unlink(missing_ok=True)
        (folder / "last").symlink_to(place.name)
        for older in folder.glob("step-*"):
            if older != place:
                shutil.rmtree(older)
        writer.write(Report(attempt=int(os.environ["CARPOOL_ATTEMPT"]), iteration=step, seconds=0.05, checkpoint=step))
        sys.exit(EXIT_STOPPED)
print(f"result {state}", flush=True)
