"""A training for the dashboard: it reports its progress, and takes longer beside others, without a GPU or PyTorch.

`python training.py ITERATIONS SECONDS_PER_ITERATION FOLDER`; jobs with the same folder slow each other down. The file
`finish` in the folder ends them.
"""

import os
import sys
import time
from pathlib import Path

from carpool.channel import ENV_ATTEMPT, ENV_DIRECTORY, EXIT_STOPPED, ControlReader, Report, ReportWriter

RECENT_S = 0.5
iterations, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
mine = folder / str(os.getpid())
reader, writer = ControlReader(os.environ[ENV_DIRECTORY]), ReportWriter(os.environ[ENV_DIRECTORY])
attempt = int(os.environ[ENV_ATTEMPT])
for iteration in range(1, iterations + 1):
    control = reader.read()
    if control.stop:
        sys.exit(EXIT_STOPPED)
    mine.touch()
    if (folder / "finish").exists():
        iteration = iterations
    others = sum(one != mine and time.time() - one.stat().st_mtime < RECENT_S for one in folder.iterdir())
    took = seconds * (1.0 + 0.3 * others)
    time.sleep(took)
    told = {"accumulation": control.accumulation, "control": control.sequence, "attempt": attempt}
    writer.write(Report(iteration=iteration, total=iterations, seconds=took, time=time.time(), **told))
    if iteration % 10 == 0:
        print(f"iteration {iteration}: loss {2.3 / (1 + iteration / 40):.3f}", flush=True)
    if iteration == iterations:
        break
mine.unlink()
