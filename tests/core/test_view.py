"""Policies see the state through views that mypy keeps read-only: one run of `mypy --strict` over small policies."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

mypy_api = pytest.importorskip("mypy.api")
SOURCE = Path(__file__).parents[2] / "src"

GOOD = """
    from dataclasses import dataclass

    from carpool.core.draft import Draft
    from carpool.core.model import Decision
    from carpool.core.view import JobView, View
    from carpool.policies.base import BasePolicy


    @dataclass
    class OldestThatFits(BasePolicy):
        name = "oldest-that-fits"

        def key(self, job: JobView, now: float) -> tuple[float, ...]:
            return (job.job.submitted, job.alone_left(now))

        def decide(self, view: View) -> list[Decision]:
            draft = Draft(view)
            for job in draft.pending(view.free.count):
                draft.start(job, "oldest that fits")
            for running in view.running:
                hosts = [mate.job.id for gpu in running.gpus for mate in view.jobs_on(gpu)]
                if not hosts and running.iteration_s > view.end_times.ends[running.seq]:
                    draft.stop(running, "never")
            what_if = view.free.copy()
            what_if.take([0])
            return draft.decisions
    """

WRITES = {
    "view.now = 0.0": 'Property "now" defined in "View" is read-only',
    "view.queue.remove(job)": '"QueueView" has no attribute "remove"',
    "view.queue.add(job, (0.0,))": '"QueueView" has no attribute "add"',
    "view.queue.buckets.clear()": 'has no attribute "clear"',
    "view.queue.in_order.sort()": 'has no attribute "sort"',
    "view.jobs['x'] = job": "Unsupported target for indexed assignment",
    "del view.jobs['x']": '"Mapping[str, JobView]" has no attribute "__delitem__"',
    "view.jobs['x'].status = Status.FAILED": 'Property "status" defined in "JobView" is read-only',
    "job.status = Status.FAILED": 'Property "status" defined in "JobView" is read-only',
    "job.job.gpus = 2": 'Property "gpus" defined in "Job" is read-only',
    "job.done = 0": 'Property "done" defined in "JobView" is read-only',
    "next(iter(view.running)).gpus = ()": 'Property "gpus" defined in "JobView" is read-only',
    "view.jobs_on(0)[0].accumulation = 2": 'Property "accumulation" defined in "JobView" is read-only',
    "next(view.queue.scan()).done = 0.0": 'Property "done" defined in "JobView" is read-only',
    "view.hosts.update(job)": '"HostsView" has no attribute "update"',
    "view.hosts.others.clear()": 'has no attribute "clear"',
    "view.hosts.others[0].record.done = 0.0": 'Property "done" defined in "JobView" is read-only',
    "next(iter(view.hosts.lone.values())).entries.pop()": 'has no attribute "pop"',
    "view.topology.taken[0] = 1": "Unsupported target for indexed assignment",
    "view.topology.add(node)": '"TopologyView" has no attribute "add"',
    "view.topology.nodes.append(node)": 'has no attribute "append"',
    "view.free.take([0])": '"FreeGpusView" has no attribute "take"',
    "view.free.count = 0": 'Property "count" defined in "FreeGpusView" is read-only',
    "view.end_times.ends[0] = 0.0": "Unsupported target for indexed assignment",
    "view.end_times.lent.add(0.0, 1)": '"AvailabilityView" has no attribute "add"',
    "view.limits['u'] = Limits()": "Unsupported target for indexed assignment",
    "view.perf = perf": 'Property "perf" defined in "View" is read-only',
    "view.apply(event)": '"View" has no attribute "apply"',
    "draft.view.queue.remove(job)": '"QueueView" has no attribute "remove"',
    "draft.residents(0)[0].record.done = 0.0": 'Property "done" defined in "JobView" is read-only',
}

HEADER = """
    from carpool.core.draft import Draft
    from carpool.core.events import Event
    from carpool.core.model import Limits, Node, Status
    from carpool.core.perf import PerformanceModel
    from carpool.core.view import JobView, View


    def write(
        view: View, draft: Draft, job: JobView, node: Node, perf: PerformanceModel, event: Event, limits: Limits
    ) -> None:
    """


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What `mypy --strict` says about each line of a policy that writes, and of one that does not (the key "")."""
    folder = tmp_path_factory.mktemp("policies")
    (folder / "good.py").write_text(dedent(GOOD))
    header = dedent(HEADER).rstrip().splitlines()
    lines = header + [f"    {write}" for write in WRITES]
    (folder / "writes.py").write_text("\n".join(lines) + "\n")
    pyproject = folder / "mypy.ini"
    pyproject.write_text(f"[mypy]\nmypy_path = {SOURCE}\nfollow_imports = silent\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ["--strict", "--config-file", str(pyproject), "--cache-dir", str(folder / "cache")]
        stdout, stderr, _ = mypy_api.run([*options, "--no-error-summary", "good.py", "writes.py"])
    assert not stderr
    found: dict[str, list[str]] = {}
    for name, number, message in re.findall(r"^(\w+)\.py:(\d+): error: (.*)$", stdout, re.MULTILINE):
        found.setdefault("" if name == "good" else lines[int(number) - 1].strip(), []).append(message)
    return found


def test_a_policy_that_only_reads_passes_the_type_checker(errors: dict[str, list[str]]) -> None:
    assert errors.get("", []) == []


@pytest.mark.parametrize("write", WRITES)
def test_a_policy_that_writes_to_its_view_is_refused(errors: dict[str, list[str]], write: str) -> None:
    messages = errors.get(write, [])
    assert any(WRITES[write] in message for message in messages), messages
