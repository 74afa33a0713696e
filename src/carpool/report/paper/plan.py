"""The runs that the report needs.

A `RunSetting` is everything about a run except its policy and its seed. Tables and figures ask for results by the same
settings that the plan lists, so that no run is made twice and none is made in vain.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.report.paper.config import PaperConfig, WorkloadEntry
from carpool.sim.run import Setup

GENERATED, FILES = "generated", "files"
PHYSICAL = "physical"
"""Name of the workload of Table II."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """Everything about a run except its policy and its seed."""

    workload: str
    """Name of one of the configuration's workloads, name of a generator, or `PHYSICAL`."""
    origin: str
    jobs: int
    setup: Setup
    shrink_batchnorm: bool = True
    """Whether the batches of models with BatchNorm can be split, as in the paper."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One simulation of the report."""

    setting: RunSetting
    policy: str
    """Name of the policy in the configuration."""
    seed: int


def data_folder() -> Path | None:
    """Return the folder of reference data that CARPOOL_DATA names, if it exists."""
    named = os.environ.get("CARPOOL_DATA")
    return Path(named) if named and Path(named).is_dir() else None


def origins(config: PaperConfig, row: WorkloadEntry) -> list[str]:
    """Return the origins of a workload: always the generator, and the file if the data folder has it."""
    folder = data_folder()
    there = config.use_files and folder is not None and (folder / row.file).is_file()
    return [GENERATED, FILES] if there else [GENERATED]


def main(config: PaperConfig, workload: str, jobs: int, origin: str = GENERATED) -> RunSetting:
    """Return the setting of Tables III and IV and of Figures 5 and 6a."""
    return RunSetting(workload, origin, jobs, config.setup)


def injected(config: PaperConfig, jobs: int, interference: str) -> RunSetting:
    """Return the setting of Figure 6b. With the slow-down of [world] it equals that of the tables."""
    return RunSetting(config.headline.name, GENERATED, jobs, replace(config.setup, truth=interference))


def constants(config: PaperConfig) -> list[str]:
    """Return the injected slow-downs as text for `injected`."""
    return [f"{xi:g}" for xi in config.figure6b.xi]


def physical(config: PaperConfig) -> RunSetting:
    return RunSetting(
        PHYSICAL, GENERATED, config.physical.small_jobs + config.physical.large_jobs, config.physical.setup
    )


def overhead(config: PaperConfig, nodes: int) -> RunSetting:
    size = config.setup.cluster.partition("x")[2]
    setup = replace(config.setup, cluster=f"{nodes}x{size}")
    return RunSetting(config.headline.name, GENERATED, nodes * config.overhead.jobs_per_node, setup)


def batchnorm(config: PaperConfig, jobs: int, can_shrink: bool) -> RunSetting:
    setup = replace(config.setup, memory_limit=True)
    return RunSetting(config.batchnorm.generator, GENERATED, jobs, setup, shrink_batchnorm=can_shrink)


def plan(config: PaperConfig) -> list[PlannedRun]:
    """Return every run once, those with the most jobs first, so that no core waits for a long run at the end."""
    return sorted(dict.fromkeys(_all(config)), key=lambda run: -run.setting.jobs)


def _all(config: PaperConfig) -> Iterator[PlannedRun]:
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
        yield from (PlannedRun(overhead(config, nodes), config.overhead.policy, seed) for seed in config.overhead.seeds)
    for jobs in config.batchnorm.jobs:
        for can_shrink in (True, False):
            yield from _runs(config, batchnorm(config, jobs, can_shrink), [config.batchnorm.policy])


def _runs(
    config: PaperConfig, setting: RunSetting, policies: Sequence[str], seeds: Sequence[int] | None = None
) -> Iterator[PlannedRun]:
    for policy in policies:
        for seed in seeds or config.seeds:
            yield PlannedRun(setting, policy, seed)
