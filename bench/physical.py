"""Compare the simulator with reality: run the same jobs on a real GPU through the live service, and simulate them.

    python bench/physical.py --out out/physical                 (with a GPU; the same call resumes after a stop)
    python bench/physical.py --gpus 1 --profile mine.json …     (logical slots, without a GPU)
    python bench/physical.py --report docs/experiments/h200-tables.md … (write the results into a page)

Thirty jobs of the paper's six tasks, each on one GPU, run under every policy and both sharing mechanisms, as real
processes that the service starts, stops, resumes and ends. Every case leaves a JSON file with a row per job, the
journal and the jobs' progress. The same jobs are simulated twice. "Simulated" knows how long each process took to start
in this run, which also shows how fast the machine's cores were. "Predicted" knows nothing of the run.
"""

import argparse
import asyncio
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from physical_live import case_record, keep, run_live, warm_up
from physical_page import page_table, replace_table, show, write_rows
from physical_sim import compare, simulate
from physical_work import (
    EXCLUSIVE,
    ExperimentCase,
    ExperimentJob,
    MachineEffects,
    MeasuredModel,
    cases,
    check,
    table,
    workload,
)

from carpool.errors import InputError
from carpool.gpu import nvml
from carpool.live.rank import boot_id
from carpool.profile.schema import Profile, load, save

WORKLOAD, PROFILE = "workload.json", "profile.json"
PATIENCE = 3.0
"""Multiple of the simulated duration, plus a minute, after which a case is given up."""


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the missing cases that fit into --minutes, and compare all results with the simulator."""
    folder, began = Path(options.out), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    jobs, profile = set_up(folder, options)
    warm = False
    for case in cases(options):
        path = folder / f"{case.name}.json"
        if path.exists():
            continue
        needs_s = simulate(case, jobs, profile, options, MachineEffects())["makespan_s"]
        if options.minutes is not None and time.monotonic() - began + needs_s > 60 * options.minutes:
            print(f"{case.name}: left for the next call (about {needs_s:.0f} s)", flush=True)
            continue
        if not warm:
            run_coroutine(warm_up(jobs, options))
            warm = True
        print(f"{case.name}: running, about {needs_s:.0f} s", flush=True)
        model = MeasuredModel(profile, table(case.mechanism, profile))
        recording = run_coroutine(run_live(case, jobs, model, PATIENCE * needs_s + 60, options))
        keep(folder, case, recording)
        result = case_record(case, recording) | {"machine": machine_name(options)}
        _write(path, result)
        print(f"{case.name}: {json.dumps(result['measured'])}", flush=True)
    return results(folder, jobs, profile, options)


def run_coroutine(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine; on SIGTERM or Ctrl-C, let it end what it started before the script exits."""

    async def whole() -> Any:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(whole())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def machine_name(options: argparse.Namespace) -> str:
    """Return a name of this machine that changes when it reboots."""
    gpu = "logical" if options.gpus else nvml.devices()[0].uuid
    return hashlib.sha256(f"{gpu} {boot_id()}".encode()).hexdigest()[:8]


ASKED = ("profile", "gpus", "jobs", "mean", "load", "seed")


def set_up(folder: Path, options: argparse.Namespace) -> tuple[list[ExperimentJob], Profile]:
    """Return the jobs and the profile that the service believes in; both are kept, because a profile may change."""
    asked = {name: getattr(options, name) for name in ASKED}
    if not (folder / WORKLOAD).exists():
        profile = load(options.profile)
        jobs = workload(profile, options)
        check(profile, options.profile, jobs, {case.mechanism for case in cases(options)})
        save(profile, folder / PROFILE)
        _write(folder / WORKLOAD, {"asked": asked, "jobs": [asdict(job) for job in jobs]})
    if read(folder / WORKLOAD)["asked"] != asked:
        raise SystemExit(f"{folder}: contains results of another workload; give another --out, or the same options")
    return stored(folder)


def stored(folder: Path) -> tuple[list[ExperimentJob], Profile]:
    return jobs_of(folder), load(str(folder / PROFILE))


def jobs_of(folder: Path) -> list[ExperimentJob]:
    return [ExperimentJob(**row) for row in read(folder / WORKLOAD)["jobs"]]


def _write(path: Path, data: Any) -> None:
    """Write a file completely or not at all, because an existing file counts as done."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(path)


def results(
    folder: Path, jobs: Sequence[ExperimentJob], profile: Profile, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return all results of the folder, measured and simulated, in the order of the cases."""
    done = [read(path) for path in folder.glob("*-run*.json")]
    truth = load(options.truth) if options.truth else None
    if truth is not None:
        check(truth, f"--truth {options.truth}", jobs, {result["case"]["mechanism"] for result in done})
    return compare(sorted(done, key=_order), jobs, profile, options, truth)


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise SystemExit(f"{path}: is damaged; remove it to run the case again") from None


def _order(result: Mapping[str, Any]) -> tuple[int, int, str, int]:
    """Return the sort key of a case: the order of the paper's table, with more jobs per GPU last."""
    case = ExperimentCase(**result["case"])
    rank = (*EXCLUSIVE, "sjf-ffs", "sjf-bsbf", "carpool").index(case.policy)
    return case.jobs_per_gpu, rank, case.mechanism, case.repeat


def kept(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results that the folder holds, without running anything."""
    if not list(folder.glob("*-run*.json")):
        raise SystemExit(f"{folder}: has no results; run the experiment with this --out first")
    options.gpus = read(folder / WORKLOAD)["asked"]["gpus"]
    return results(folder, *stored(folder), options)


def positive(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        number = kind(text)
        if not 0 < number < math.inf:
            raise ValueError(text)
        return number

    read.__name__ = f"number above 0 ({kind.__name__})"  # argparse's message names it
    return read


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number, whole = positive(float), positive(int)
    parser.add_argument("--out", default="out/physical", help="folder of results and journals")
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--truth", help="profile of the simulated world  [default: the one that the service had]")
    parser.add_argument("--gpus", type=whole, help="number of logical slots to use instead of the GPU")
    parser.add_argument("--jobs", type=whole, default=30)
    parser.add_argument("--mean", type=number, default=4.0, help="mean run time of a job alone, in seconds")
    parser.add_argument("--load", type=number, default=2.5, help="arrival rate divided by what one GPU can serve")
    parser.add_argument("--repeats", type=whole, default=2)
    parser.add_argument(
        "--more-jobs-per-gpu", type=whole, nargs="*", default=[3, 4], help="more jobs per GPU to try under MPS"
    )
    parser.add_argument("--only", nargs="*", help="run only these policies or cases")
    parser.add_argument("--minutes", type=number, help="start no case that would end after this many minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", help="folder of the example scripts")
    parser.add_argument("--report", type=Path, help="run nothing; write the results into this page")
    parser.add_argument("--rows", type=Path, help="run nothing; write the results as a CSV file for `carpool paper`")
    return parser.parse_args()


def _check_places(options: argparse.Namespace) -> None:
    """Check that the output can be written, before minutes of simulation."""
    if options.report:
        options.report.read_text()
    if options.rows and not options.rows.absolute().parent.is_dir():
        raise SystemExit(f"{options.rows.parent}: no such folder; create it first")


def main() -> None:
    options = read_options()
    if options.report or options.rows:
        _check_places(options)
        rows = kept(Path(options.out), options)
        if options.report:
            replace_table(options.report, page_table(rows))
        if options.rows:
            write_rows(options.rows, rows)
        return
    if not options.gpus and not nvml.devices():
        raise SystemExit("no GPU found; --gpus 1 uses a logical slot, with a profile of this machine")
    show(run_all(options))


def in_one_line(program: Callable[[], None]) -> None:
    """Run a program; print wrong input as one line."""
    try:
        program()
    except InputError as error:
        raise SystemExit(str(error)) from None
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None


if __name__ == "__main__":
    in_one_line(main)
