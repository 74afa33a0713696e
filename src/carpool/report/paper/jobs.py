"""The jobs of a run: from a generator, from the real files, or the 30 jobs of the paper's physical experiment."""

from dataclasses import replace
from math import exp, log
from random import Random

from carpool.core.model import Job
from carpool.core.perf import Placement
from carpool.errors import InputError
from carpool.profile.schema import load as load_profile
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.plan import FILES, PHYSICAL, PlannedRun, data_folder
from carpool.sim import generate
from carpool.sim.run import cluster_nodes
from carpool.sim.sources import generated
from carpool.sim.workload import Workload, read


def workload_of(config: PaperConfig, run: PlannedRun) -> Workload:
    """Return the jobs of a run."""
    workload = _drawn(config, run)
    if run.setting.shrink_batchnorm:
        return workload
    tasks = load_profile(config.setup.profile).tasks
    kept = (replace(job, can_shrink=not tasks[job.model].batch_norm) for job in workload.jobs)
    return replace(workload, jobs=tuple(kept))


def _drawn(config: PaperConfig, run: PlannedRun) -> Workload:
    setting = run.setting
    if setting.workload == PHYSICAL:
        return thirty_jobs(config, run.seed)
    row = next((row for row in config.workloads if row.name == setting.workload), None)
    if setting.origin == FILES and row is not None:
        folder = data_folder()
        if folder is None:
            raise InputError("CARPOOL_DATA: the folder has disappeared; run the command again")
        return read(folder / row.file, {"n": str(setting.jobs), "seed": str(run.seed)})
    name = row.generator if row else setting.workload
    return generated(name, config.setup.profile, jobs=setting.jobs, seed=run.seed, hours=config.hours)


def thirty_jobs(config: PaperConfig, seed: int) -> Workload:
    """Return the jobs of the physical experiment; [physical] sets what the paper leaves open.

    The jobs arrive evenly over the time that all of them together would keep all GPUs busy.
    """
    rule = config.physical
    tasks = load_profile(rule.setup.profile).core_tasks()
    random = Random(f"thirty jobs {seed}")
    gangs = [random.choice(rule.small_gpus) for _ in range(rule.small_jobs)]
    gangs += [random.choice(rule.large_gpus) for _ in range(rule.large_jobs)]
    random.shuffle(gangs)
    nodes = cluster_nodes(rule.setup)
    per_node = len(nodes[0].gpus)
    least, most = (log(bound) for bound in rule.iterations)
    drawn = []
    for gpus in gangs:
        model = random.choice(generate.MODELS)
        drawn.append((model, gpus, round(exp(random.uniform(least, most))), random.random()))
    gpu_s = 0.0
    for model, gpus, iterations, _ in drawn:
        placement = Placement(gpus, -(-gpus // per_node))
        gpu_s += gpus * iterations * tasks[model].iteration(generate.FITTING_BATCHES[model], 1, placement)
    span = gpu_s / (per_node * len(nodes))
    drawn.sort(key=lambda one: one[3])
    jobs = (
        Job(f"{model}-{number}", float(round(span * moment)), model, gpus, generate.FITTING_BATCHES[model], iterations)
        for number, (model, gpus, iterations, moment) in enumerate(drawn, start=1)
    )
    return Workload(tuple(jobs), f"{len(drawn)} jobs as in the paper's physical experiment (seed={seed})")
