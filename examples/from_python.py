"""Compare two policies from Python, and look at the jobs that gained and lost most."""

from pathlib import Path

from carpool.sim import Setup, read, simulate

workload = read(Path(__file__).with_name("jobs.csv"))
setup = Setup(cluster="2x4", truth="gavel")
alone, shared = (simulate(workload, policy, setup) for policy in ("sjf", "sjf-bsbf"))

ends = {record.job.id: record.ended for record in alone.jobs}
print(f"mean completion time: {alone.summary.mean_jct_s:.0f} s alone, {shared.summary.mean_jct_s:.0f} s shared")
for record in sorted(shared.jobs, key=lambda record: record.ended - ends[record.job.id]):
    change = record.ended - ends[record.job.id]
    role = "guest" if record.shares else "host" if record.hosted else "alone"
    print(
        f"{record.job.id:10} {change:+8.0f} s  ({role}, ran {record.ran_s / record.alone_s:.2f} times as long as alone)"
    )
