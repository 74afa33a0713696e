"""The tables of the report.

They are Tables II, III and IV beside the paper's numbers, the data of Figures 6a and 6b, the overhead, BatchNorm, and
how well the generated workloads agree with the real files.
"""

from math import sqrt
from typing import Any

from carpool.report.paper import plan
from carpool.report.paper.cells import CLOSE, ReportTable, TableCell, deviation, missing, ours, paper, plain
from carpool.report.paper.config import PaperConfig, PolicyEntry, WorkloadEntry
from carpool.report.paper.plan import FILES, GENERATED
from carpool.report.paper.results import Results, Value, jct_h, queue_h
from carpool.sim.sweep import Mean

PARTS = ("all", "large", "small")
ORIGIN_NAMES = {GENERATED: "generated", FILES: "files"}
Sources = list[tuple[WorkloadEntry, str]]


def sources(config: PaperConfig) -> Sources:
    """Return the workloads that were run: the generated ones first, then the real files if they exist."""
    found = [(row, origin) for row in config.workloads for origin in plan.origins(config, row)]
    return sorted(found, key=lambda source: source[1] == FILES)


def simulated(results: Results, table: str, metric: str) -> ReportTable:
    """Return Table III or IV, completion or queuing times."""
    config = results.config
    jobs = config.tables[table]
    value = {"jct": jct_h, "queue": queue_h}[metric]
    printed = {"jct": config.paper.jct, "queue": config.paper.queue}[metric][table]
    known = sources(config)
    rows: list[tuple[TableCell, ...]] = []
    data: list[tuple[Any, ...]] = []
    for policy in config.policies:
        own = printed.get(policy.paper)
        row = [plain(policy.label), *(paper(number) for number in own or ())] if own else [plain(policy.label)]
        row += [] if own else [missing() for _ in PARTS]
        for workload, origin in known:
            setting = plan.main(config, workload.name, jobs, origin)
            for number, part in enumerate(PARTS):
                found = results.mean(setting, policy.name, value(part))
                if origin == GENERATED or part == "all":
                    row.append(ours(found, printed=own[number] if own else None))
                data.append(_long(policy, workload, origin, part, found, own and own[number], results, setting))
        rows.append(tuple(row))
    groups = [("", 1), ("paper", 3)]
    header = ["policy", *PARTS]
    for workload, origin in known:
        parts = PARTS if origin == GENERATED else ("all",)
        groups.append((f"{workload.title}, {ORIGIN_NAMES[origin]}", len(parts)))
        header += parts
    what = {"jct": "Mean completion time", "queue": "Mean queuing time"}[metric]
    return ReportTable(
        name=f"table{table}_{metric}",
        title=f"{what} in hours, {jobs} jobs",
        groups=tuple(groups),
        header=tuple(header),
        rows=tuple(rows),
        csv_header=(
            "policy",
            "workload",
            "origin",
            "part",
            "paper_h",
            "ours_h",
            "standard_error_h",
            "deviation_%",
            "seeds",
        ),
        csv_rows=tuple(data),
        note=_misprint(table, metric),
    )


def _long(
    policy: PolicyEntry,
    workload: WorkloadEntry,
    origin: str,
    part: str,
    found: Mean | None,
    printed: float | None,
    results: Results,
    setting: plan.RunSetting,
) -> tuple[Any, ...]:
    off = deviation(found.value, printed) if found and printed else None
    seeds = len(results.of(setting, policy.name))
    row = (policy.name, workload.name, origin, part)
    return (*row, _number(printed), *_mean(found), _number(off), seeds)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _misprint(table: str, metric: str) -> str:
    if metric == "queue" and table == "IV":
        return "The paper's row for FIFO is a copy of SJF-FFS's and is left out."
    if metric == "queue":
        return "The paper's Pollux queues longer (small jobs, 0.97 h) than its jobs take (0.91 h), which cannot be."
    return ""


def physical(results: Results) -> ReportTable:
    """Return Table II. Seconds on other GPUs cannot be compared, so both columns are also shown relative to FIFO."""
    config = results.config
    setting = plan.physical(config)
    values: tuple[Value, Value] = (lambda o: o.summary.makespan_s, lambda o: o.summary.mean_jct_s)
    base = config.paper.physical["fifo"]
    ours_base = [results.mean(setting, "fifo", value) for value in values]
    rows, data = [], []
    for name in config.physical.policies:
        policy = config.policy(name)
        printed = config.paper.physical.get(policy.paper)
        found = [results.mean(setting, name, value) for value in values]
        row = [plain(policy.label)]
        line: list[Any] = [name]
        for number in range(2):
            mean, fifo = found[number], ours_base[number]
            theirs = printed[number] / base[number] if printed else None
            relative = Mean(mean.value / fifo.value, None) if mean and fifo else None
            row += [paper(printed and printed[number], 0), ours(mean, 0), paper(theirs), ours(relative, printed=theirs)]
            line += [printed and printed[number], mean and mean.value, mean and mean.error, theirs]
            line += [relative and relative.value]
        rows.append(tuple(row))
        data.append(tuple(_number(cell) if isinstance(cell, float | int) else cell or "" for cell in line))
    columns = ("paper, s", "ours, s", "paper ÷ FIFO", "ours ÷ FIFO")
    names = ("paper_s", "ours_s", "standard_error_s", "paper_of_fifo", "ours_of_fifo")
    return ReportTable(
        name="tableII",
        title=f"{setting.jobs} jobs on {config.physical.setup.cluster} GPUs, {len(config.seeds)} seeds",
        groups=(("", 1), ("makespan", 4), ("mean completion time", 4)),
        header=("policy", *columns, *columns),
        rows=tuple(rows),
        csv_header=("policy", *(f"{what}_{name}" for what in ("makespan", "jct") for name in names)),
        csv_rows=tuple(data),
    )


def loads(results: Results) -> ReportTable:
    """Return the data of Figure 6a."""
    config = results.config
    rows, data = [], []
    for policy in config.policies:
        row = [plain(policy.label)]
        for workload in config.workloads:
            for jobs in config.figure6a:
                found = results.mean(plan.main(config, workload.name, jobs), policy.name, jct_h())
                row.append(ours(found, printed=_printed_jct(config, policy, jobs)))
                data.append((policy.name, workload.name, jobs, *_mean(found)))
        rows.append(tuple(row))
    return ReportTable(
        name="figure6a",
        title=f"Mean completion time in hours against the number of jobs in {config.hours:g} hours",
        groups=(("", 1), *((f"{row.title}, generated", len(config.figure6a)) for row in config.workloads)),
        header=("policy", *(f"{jobs} jobs" for _ in config.workloads for jobs in config.figure6a)),
        rows=tuple(rows),
        csv_header=("policy", "workload", "jobs", "mean_jct_h", "standard_error_h"),
        csv_rows=tuple(data),
    )


def _printed_jct(config: PaperConfig, policy: PolicyEntry, jobs: int) -> float | None:
    table = next((name for name, count in config.tables.items() if count == jobs), None)
    printed = config.paper.jct[table].get(policy.paper) if table else None
    return printed[0] if printed else None


def _mean(found: Mean | None) -> tuple[str, str]:
    return (_number(found.value), _number(found.error)) if found else ("", "")


def interference(results: Results) -> ReportTable:
    """Return the data of Figure 6b, and the same with measured pairs."""
    config = results.config
    first, second = config.figure6b.policies[0], config.figure6b.policies[-1]
    rows, data = [], []
    for text in (*plan.constants(config), *config.figure6b.tables):
        row = [plain(f"ξ = {text}" if text in plan.constants(config) else f"measured pairs: {text}")]
        for jobs in config.figure6b.jobs:
            setting = plan.injected(config, jobs, text)
            for name in config.figure6b.policies:
                row.append(ours(results.mean(setting, name, jct_h())))
                data.append((text, jobs, name, *_mean(results.mean(setting, name, jct_h()))))
            gain = results.lower(setting, second, first, jct_h())
            row.append(ours(gain, 1))
        rows.append(tuple(row))
    labels = [config.policy(name).label for name in config.figure6b.policies]
    gain_label = f"{labels[-1]}: % lower"
    return ReportTable(
        name="figure6b",
        title=f"Mean completion time in hours, injected and measured slow-downs ({config.headline.title} workload)",
        groups=(("", 1), *((f"{jobs} jobs", len(labels) + 1) for jobs in config.figure6b.jobs)),
        header=("slow-down", *(label for _ in config.figure6b.jobs for label in (*labels, gain_label))),
        rows=tuple(rows),
        csv_header=("slowdown", "jobs", "policy", "mean_jct_h", "standard_error_h"),
        csv_rows=tuple(data),
    )


def nearest_constant(results: Results) -> str:
    """Return a sentence on which injected slow-down comes nearest to the paper at both loads."""
    config = results.config
    worst: dict[str, float] = {}
    for text in plan.constants(config):
        offs = []
        for table, jobs in config.tables.items():
            for name in config.figure6b.policies:
                found = results.mean(plan.injected(config, jobs, text), name, jct_h())
                printed = config.paper.jct[table].get(config.policy(name).paper)
                if found and printed:
                    offs.append(abs(deviation(found.value, printed[0])))
        if offs:
            worst[text] = max(offs)
    if not worst:
        return ""
    best = min(worst, key=lambda text: worst[text])
    nearest = f"Of these constants, {best} comes nearest to the paper's tables, within {worst[best]:.0f} %"
    return f"{nearest}; none matches all of them." if worst[best] > CLOSE else f"{nearest}."


def overhead(results: Results) -> ReportTable:
    config = results.config
    rows, data = [], []
    for nodes in config.overhead.nodes:
        setting = plan.overhead(config, nodes)
        gpus = gpus_of(setting)
        name = config.overhead.policy
        decisions = results.mean(setting, name, lambda o: float(o.summary.decisions))
        mean_ms = results.mean(setting, name, lambda o: 1e3 * o.summary.decision_mean_cpu_s)
        p99_ms = results.mean(setting, name, lambda o: 1e3 * o.summary.decision_p99_cpu_s)
        limit = paper(1e3 * config.paper.claims["overhead_s"], 0) if gpus == 16 else missing()
        cells = (plain(gpus), plain(setting.jobs), ours(decisions, 0), limit, ours(mean_ms, 3), ours(p99_ms, 3))
        rows.append(cells)
        data.append((gpus, setting.jobs, *_mean(mean_ms), *_mean(p99_ms)))
    return ReportTable(
        name="overhead",
        title=f"CPU time of a decision of {config.policy(config.overhead.policy).label}, until its plan is applied",
        header=("GPUs", "jobs", "decisions", "paper's limit, ms", "mean, ms", "p99, ms"),
        rows=tuple(rows),
        csv_header=("gpus", "jobs", "mean_ms", "mean_error_ms", "p99_ms", "p99_error_ms"),
        csv_rows=tuple(data),
        note="Measured on the machine that made the report, while other simulations ran.",
    )


def gpus_of(setting: plan.RunSetting) -> int:
    nodes, _, size = setting.setup.cluster.partition("x")
    return int(nodes) * int(size)


BATCHNORM_COLUMNS = (
    "rule", "jobs", "mean_jct_h", "jct_error_h", "mean_queue_h", "queue_error_h", "shares", "shares_error",
)  # fmt: skip


def batchnorm(results: Results) -> ReportTable:
    """Return what it costs not to split the batches of models with BatchNorm, one row per rule."""
    config = results.config
    name = config.batchnorm.policy
    rows, data = [], []
    texts = {True: "every batch can be split (paper)", False: "batches of models with BatchNorm stay whole"}
    for can_shrink, text in texts.items():
        row = [plain(text)]
        for jobs in config.batchnorm.jobs:
            setting = plan.batchnorm(config, jobs, can_shrink)
            jct, queue = results.mean(setting, name, jct_h()), results.mean(setting, name, queue_h())
            shares = results.mean(setting, name, lambda o: float(o.summary.shares))
            row += [ours(jct), ours(queue), ours(shares, 0)]
            data.append((text, jobs, *_mean(jct), *_mean(queue), *_mean(shares)))
        rows.append(tuple(row))
    return ReportTable(
        name="batchnorm",
        title=f"{config.policy(name).label} with memory limits, {config.batchnorm.generator} jobs",
        groups=(("", 1), *((f"{jobs} jobs", 3) for jobs in config.batchnorm.jobs)),
        header=("rule", *("mean JCT, h", "queue, h", "shares") * len(config.batchnorm.jobs)),
        rows=tuple(rows),
        csv_header=BATCHNORM_COLUMNS,
        csv_rows=tuple(data),
    )


def agreement(results: Results) -> ReportTable | None:
    """Return a comparison of generated workloads with the real files; None if there are no files."""
    config = results.config
    rows, data = [], []
    for workload in config.workloads:
        if FILES not in plan.origins(config, workload):
            continue
        for jobs in config.tables.values():
            for name in ("sjf", "sjf-bsbf"):
                made, real = (
                    results.mean(plan.main(config, workload.name, jobs, origin), name, jct_h())
                    for origin in (GENERATED, FILES)
                )
                gap = _gap(made, real)
                shown = plain(
                    "–" if gap is None else f"{gap:.1f}", "" if gap is None else "close" if gap <= 2 else "far"
                )
                label = f"{workload.title}, {jobs} jobs, {config.policy(name).label}"
                rows.append((plain(label), ours(made), ours(real), shown))
                data.append((workload.name, jobs, name, *_mean(made), *_mean(real), _number(gap)))
    if not rows:
        return None
    return ReportTable(
        name="agreement",
        title="Generated workloads and real files: mean completion time in hours",
        header=("workload, policy", "generated", "real files", "difference in standard errors"),
        rows=tuple(rows),
        csv_header=("workload", "jobs", "policy", "made_h", "made_error_h", "real_h", "real_error_h", "difference_se"),
        csv_rows=tuple(data),
    )


def _gap(made: Mean | None, real: Mean | None) -> float | None:
    """Return the distance of two means, in standard errors of their difference."""
    if made is None or real is None or made.error is None or real.error is None:
        return None
    spread = sqrt(made.error**2 + real.error**2)
    return abs(made.value - real.value) / spread if spread else None
