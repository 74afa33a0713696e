"""Plays a training script for the profiler: known times, a known slow-down beside others, and ways to go wrong.

An iteration takes (fixed · accumulation + per-sample · batch) · (1 + 0.5 · others), where others are the processes of
the same crowd that moved within the last moments: a paused one does not count, as on a real GPU.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from carpool.channel import ENV_DIRECTORY, ControlReader, Report, ReportWriter, WorkerStatus

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--fixed", type=float, default=0.004)
parser.add_argument("--per-sample", type=float, default=0.001)
parser.add_argument("--crowd", type=Path)
parser.add_argument("--runs-at", type=int, help="the batch, whatever --batch-size says")
parser.add_argument("--own-accumulation", type=int, default=1)
parser.add_argument("--refuse", type=int, help="an accumulation that is not taken up")
parser.add_argument(
    "--room", type=int, help="beside more processes than that it splits its batch, as for want of memory"
)
parser.add_argument("--child", action="store_true", help="start a process of its own, as data loaders do")
parser.add_argument("--fail", choices=["crash", "silent", "short", "memory", "mute"])
args = parser.parse_args()
batch = args.runs_at or args.batch_size
RECENT_S = 0.15


def others():
    mine, now = args.crowd / str(os.getpid()), time.time()
    mine.touch()
    return sum(path != mine and now - path.stat().st_mtime < RECENT_S for path in args.crowd.iterdir())


def short_of_memory():
    """A paused process takes its memory, too."""
    (args.crowd / str(os.getpid())).touch()
    return sum(Path(f"/proc/{path.name}").exists() for path in args.crowd.iterdir()) > args.room


if args.fail == "crash":
    raise ValueError("the data set is not there")
if args.fail == "silent":
    sys.exit(0)
if args.fail == "memory":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
if args.fail == "mute":
    time.sleep(600)
if args.child:
    subprocess.Popen(["sleep", "600"])
reader, writer = ControlReader(os.environ[ENV_DIRECTORY]), ReportWriter(os.environ[ENV_DIRECTORY])
iteration, split = 0, 2 if args.room and short_of_memory() else 1
while not (args.fail == "short" and iteration == 6):
    control = reader.read()
    if control.stop:
        sys.exit(75)
    wanted = max(args.own_accumulation, control.accumulation, split)
    accumulation = 1 if wanted == args.refuse else wanted
    slower = 1 + 0.5 * others() if args.crowd else 1
    seconds = (args.fixed * accumulation + args.per_sample * batch) * slower
    time.sleep(seconds)
    iteration += 1
    done = Report(
        iteration=iteration,
        seconds=seconds,
        samples_per_second=batch / seconds,
        accumulation=accumulation,
        control=control.sequence,
        out_of_memory=split - 1,
        time=time.time(),
        status=WorkerStatus.RUNNING,
    )
    writer.write(done)
