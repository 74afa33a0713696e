"""Results of the physical experiment: a table in the terminal, a page, and the rows that `carpool paper` reads."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from physical_sim import compared
from physical_work import EXCLUSIVE

from carpool.report.paper.measured import COLUMNS, FIGURES, PARTS

HEADS = ("policy", "mechanism", "jobs per GPU", "runs", "makespan s", "mean JCT s", "mean queue s", "GPU busy")


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{'case':28}{'runs':>5}" + "".join(f"{head:>42}" for head in ("makespan s", "mean JCT s", "queue s")))
    for row in rows:
        label = f"{row['policy']} {row['mechanism']} C={row['jobs_per_gpu']}"
        cells = []
        for key in FIGURES:
            found = compared(row, key)
            simulated = f"{found.simulated:.1f} {_off(found.off)}"
            cells.append(f"{found.measured:.1f} / {simulated} / {found.predicted:.1f} {_off(found.predicted_off)}")
        print(f"{label:28}{len(row['measured']['makespan_s']):>5}" + "".join(f"{cell:>42}" for cell in cells))
    print("\n".join(gains(rows)))
    print("(measured / simulated with the run's own starts / predicted)")


def gains(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare sharing with exclusive SJF on the same jobs: measured on the same machine, and simulated for it."""
    base = next((row for row in rows if row["policy"] == "sjf"), None)
    alone = _jct_by_machine(base) if base else {}
    found = []
    for row in rows:
        if row["policy"] not in EXCLUSIVE:
            here = {machine: jct for machine, jct in _jct_by_machine(row).items() if machine in alone}
            measured = [alone[machine] / jct for machine, jct in here.items()]
            both = zip(row["sjf_jct_s"], row["measured"]["mean_jct_s"], strict=True)
            what = f"{row['policy']}, {row['mechanism']}, up to {row['jobs_per_gpu']} jobs per GPU"
            here_too = f"{_listed(measured)} on the same machine" if measured else "not measured on the same machine"
            simulated = f"{_listed([sjf / jct for sjf, jct in both])} by simulation with the same cores"
            found.append(f"- {what}: mean JCT of exclusive SJF over that of this case: {here_too}; {simulated}")
    return found


def _listed(ratios: Sequence[float]) -> str:
    return " and ".join(f"{ratio:.2f}" for ratio in sorted(ratios))


def _jct_by_machine(row: Mapping[str, Any]) -> dict[str, float]:
    seen: dict[str, list[float]] = {}
    for machine, jct in zip(row["machines"], row["measured"]["mean_jct_s"], strict=True):
        seen.setdefault(machine, []).append(jct)
    return {machine: fmean(jcts) for machine, jcts in seen.items()}


def page_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [_line(HEADS), _line(["---"] * len(HEADS))]
    for row in rows:
        runs = str(len(row["measured"]["makespan_s"]))
        cells = [_cell(row, key) for key in FIGURES]
        measured, simulated = _busy(row)
        busy = "–" if measured is None else f"{measured:.0%} / **{simulated:.0%}**"
        lines.append(_line([row["policy"], row["mechanism"], str(_jobs_per_gpu(row)), runs, *cells, busy]))
    return "\n".join([*lines, "", *gains(rows), "", *_runs_table(rows)]) + "\n"


def _runs_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of single runs, because means over runs may hide errors in opposite directions."""
    heads = ("case", "run", "machine", "slowness of its cores", "makespan s", "mean JCT s")
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        for run, (machine, slowness) in enumerate(zip(row["machines"], row["slowness"], strict=True)):
            cells = []
            for key in FIGURES[:2]:
                found = compared(row, key, run)
                cells.append(f"{found.measured:.1f} ({_off(found.off)} / {_off(found.predicted_off)})")
            case = f"{row['policy']}, {row['mechanism']}, {_jobs_per_gpu(row)}"
            lines.append(_line([case, str(run + 1), machine, f"{slowness:.2f}", *cells]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(row: Mapping[str, Any], key: str) -> str:
    found = compared(row, key)
    simulated = f"**{found.simulated:.1f}** ± {found.spread:.1f} ({_off(found.off)})"
    return f"{found.measured:.1f} / {simulated} / {found.predicted:.1f} ({_off(found.predicted_off)})"


def _off(off: float | None) -> str:
    return "–" if off is None else f"{off:+.1f} %"


def _jobs_per_gpu(row: Mapping[str, Any]) -> int:
    return 1 if row["policy"] in EXCLUSIVE else int(row["jobs_per_gpu"])


def _busy(row: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return how busy the GPU was: by the driver's counter, if it was recorded, and simulated."""
    counted = [share for share in row["measured"]["gpu_utilisation"] if share is not None]
    return fmean(counted) if counted else None, fmean(map(fmean, row["simulated"]["gpu_utilisation"]))


def replace_table(path: Path, table: str) -> None:
    """Replace the text between the two marks of the page."""
    begin, end = "<!-- measured: begin -->\n", "<!-- measured: end -->"
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path}: mark the place of the table with {begin.strip()} and {end}")
    path.write_text(before + begin + table + end + after)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one row per case, in the format that `carpool paper` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            found = [compared(row, key) for key in FIGURES]
            figures = [f"{getattr(each, part):.2f}" for each in found for part in PARTS]
            busy = _busy(row)
            what = [row["policy"], row["mechanism"], _jobs_per_gpu(row), len(row["measured"]["makespan_s"])]
            writer.writerow([*what, *figures, *("" if share is None else f"{share:.3f}" for share in busy)])
