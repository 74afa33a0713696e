"""Which runs the report needs. A `Setting` is everything about a run but its policy and its seed; tables and figures
ask for
their results by the same settings that the plan lists, so that nothing is run that nobody shows, and nothing twice."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.report.paper.config import Config, WorkloadRow
from carpool.sim.run import Setup

GENERATED, FILES = "generated", "files"
PHYSICAL = "physical"
"""The workload of Table II, which is neither of the two."""


@dataclass(frozen=True, slots=True)
class Setting:
    workload: str
    """The name of one of the configuration's workloads, a generator's name, or `PHYSICAL`."""
    origin: str
    jobs: int
    setup: Setup
    shrink_batchnorm: bool = True
    """May the batches of models with BatchNorm be split, as in the paper?"""


@dataclass(frozen=True, slots=True)
class Run:
    setting: Setting
    policy: str
    """Its name in the configuration."""
    seed: int


def data_folder() -> Path | None:
    """The folder of reference data named by CARPOOL_DATA, if it is there."""
    named = os.environ.get("CARPOOL_DATA")
    return Path(named) if named and Path(named).is_dir() else None


def origins(config: Config, row: WorkloadRow) -> list[str]:
    """From where a workload is taken: the generator always, the files where the data folder has them."""
    folder = data_folder()
    there = config.use_files and folder is not None and (folder / row.file).is_file()
    return [GENERATED, FILES] if there else [GENERATED]


def main(config: Config, workload: str, jobs: int, origin: str = GENERATED) -> Setting:
    """The runs of Tables III and IV and of Figures 5 and 6a."""
    return Setting(workload, origin, jobs, config.setup)


def injected(config: Config, jobs: int, interference: str) -> Setting:
    """Figure 6b. A slow-down that is the world's own gives the very runs of the tables."""
    return Setting(config.headline.name, GENERATED, jobs, replace(config.setup, truth=interference))


def constants(config: Config) -> list[str]:
    """The injected slow-downs as they are written for `interference`."""
    return [f"{xi:g}" for xi in config.figure6b.xi]


def physical(config: Config) -> Setting:
    return Setting(PHYSICAL, GENERATED, config.physical.small_jobs + config.physical.large_jobs, config.physical.setup)


def overhead(config: Config, nodes: int) -> Setting:
    size = config.setup.cluster.partition("x")[2]
    setup = replace(config.setup, cluster=f"{nodes}x{size}")
    return Setting(config.headline.name, GENERATED, nodes * config.overhead.jobs_per_node, setup)


def batchnorm(config: Config, jobs: int, may_shrink: bool) -> Setting:
    setup = replace(config.setup, memory_limit=True)
    return Setting(config.batchnorm.generator, GENERATED, jobs, setup, shrink_batchnorm=may_shrink)


def plan(config: Config) -> list[Run]:
    """Every run, once; those with the most jobs first, so that no core waits for them at the end."""
    return sorted(dict.fromkeys(_all(config)), key=lambda run: -run.setting.jobs)


def _all(config: Config) -> Iterator[Run]:
    names = [row.name for row in config.policies]
    for workload in config.workloads:
        for jobs in {*config.tables.values(), config.figure5, *config.figure6a}:
            yield from _runs(config, main(config, workload.name, jobs), names)
        if FILES in origins(config, workload):
            for jobs in config.tables.values():
                yield from _runs(config, main(config, workload.name, jobs, FILES), names, workload.file_seeds)
    for jobs in config.figure6b.jobs:
        for interference in (*constants(config), *config.figure6b.tables):
            yield from _runs(config, injected(config, jobs, interference), config.figure6b.policies)
    yield from _runs(config, physical(config), config.physical.policies)
    for nodes in config.overhead.nodes:
        yield from (Run(overhead(config, nodes), config.overhead.policy, seed) for seed in config.overhead.seeds)
    for jobs in config.batchnorm.jobs:
        for may_shrink in (True, False):
            yield from _runs(config, batchnorm(config, jobs, may_shrink), [config.batchnorm.policy])


def _runs(
    config: Config, setting: Setting, policies: Sequence[str], seeds: Sequence[int] | None = None
) -> Iterator[Run]:
    for policy in policies:
        for seed in seeds or config.seeds:
            yield Run(setting, policy, seed)
