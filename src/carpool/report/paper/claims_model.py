"""The claims about the cost of a decision, interference and gradient accumulation."""

from collections.abc import Iterator
from math import log
from statistics import linear_regression

from carpool.profile.schema import load as load_profile
from carpool.report.paper import plan
from carpool.report.paper.cells import show
from carpool.report.paper.claim import Claim
from carpool.report.paper.results import Results
from carpool.report.paper.tables import gpus_of
from carpool.report.paper.verdicts import every


def cost(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    sizes = {gpus_of(setting): setting for setting in (plan.overhead(config, nodes) for nodes in config.overhead.nodes)}
    means = {
        gpus: results.mean(setting, config.overhead.policy, lambda o: o.summary.decision_mean_cpu_s)
        for gpus, setting in sizes.items()
    }
    small = means.get(16)
    yield Claim(
        "Section V-B",
        f"A scheduling operation on 16 GPUs takes less than {said['overhead_s']:g} s",
        f"{1e3 * said['overhead_s']:g} ms",
        "–" if small is None else f"{1e3 * small.value:.2f} ms on average",
        every([None if small is None else small.value < said["overhead_s"]]),
        "CPU time in the simulator, including the checks that the live service makes.",
    )
    known = [(log(gpus), log(found.value)) for gpus, found in means.items() if found]
    slope = linear_regression(*zip(*known, strict=True)).slope if len(known) > 1 else None
    yield Claim(
        "Section V-B",
        "The time of a decision grows about linearly with the GPUs (|G| log B + |J| log |J|)",
        "linear, times a logarithm",
        "–" if slope is None else f"GPUs to the power of {show(slope, 2)}, {min(sizes)}–{max(sizes)} GPUs",
        every([None if slope is None else slope <= 1.1]),
        "Reproduced if the power is at most 1.1. Carpool evaluates each host once instead of each GPU, and stops each "
        "group of similar hosts at one point.",
    )
    pairs = [xi for pair in load_profile("gavel").pairs for xi in (pair.xi_a, pair.xi_b)]
    pairs += [xi for pair in load_profile("h200").pairs for xi in (pair.xi_a, pair.xi_b)]
    yield Claim(
        "Section IV-B, Fig. 3",
        "Interference ratios range widely, up to 6",
        f"up to {said['largest_xi']:g}",
        f"up to {max(pairs):.1f}",
        every([max(pairs) >= said["largest_xi"] / 2, max(pairs) >= said["largest_xi"] - 1]),
        "The pairs that we ship (Gavel's on a V100, ours on an H200) have one GPU each; no public data has pairs on "
        "several GPUs. Reproduced if the largest is at least 5, partly if at least 3.",
    )


def accumulation(results: Results) -> Claim:
    tasks = load_profile(results.config.setup.profile).tasks
    same = sorted(name for name, task in tasks.items() if not task.batch_norm)
    return Claim(
        "Section I",
        "Gradient accumulation is completely equivalent to training with the larger batch",
        "always",
        f"{len(same)} of {len(tasks)} models ({', '.join(same)})",
        every([not task.batch_norm for task in tasks.values()], least=1),
        "BatchNorm takes its statistics from each micro-batch, so the other models train differently when their batch "
        "is split. Partly if it holds for at least one model.",
    )
