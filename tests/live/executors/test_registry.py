"""Executors are chosen by name: built in, or from installed packages through an entry point."""

from importlib.metadata import EntryPoint

import pytest

from carpool.errors import InputError
from carpool.live.executors import registry
from carpool.live.executors.base import ExecutorOptions
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.executors.registry import check_executor, executor_names, make_executor
from tests.support.command_line import call


def in_memory(options: ExecutorOptions) -> MemoryExecutor:
    """A factory, as a package would have one."""
    return MemoryExecutor(gpus=int(options.settings["gpus"]))


NOT_A_FACTORY = 3


@pytest.fixture
def installed(monkeypatch):
    """Installs entry points: name to value."""

    def install(**values: str) -> None:
        points = [EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return install


def test_the_local_executor_is_built_in(home):
    assert isinstance(make_executor("local", ExecutorOptions(home, gpus=2)), LocalExecutor)
    assert "local" in executor_names()


def test_a_package_adds_an_executor_with_settings(home, installed):
    installed(memory=f"{__name__}:in_memory")
    assert executor_names() == sorted([*registry.BUILT_IN, "memory"])
    executor = make_executor("memory:gpus=3", ExecutorOptions(home))
    assert [len(node.slots) for node in executor.nodes()] == [3]


def test_a_package_cannot_replace_a_built_in_executor(home, installed):
    installed(local=f"{__name__}:in_memory")
    assert isinstance(make_executor("local", ExecutorOptions(home)), LocalExecutor)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nowhere", "there is no such executor; known: .*broken, .*local, .*number"),
        ("lokal", r"did you mean local\? known: .*broken, .*local, .*number"),
        ("broken", "does not load .*fix its package"),
        ("number", "neither a class nor a function"),
        ("local:x", "write it as key=value"),
        ("local:x=1,x=2", "given twice"),
    ],
)
def test_a_wrong_executor_is_one_clear_line(installed, text, problem):
    installed(broken="no.such.module:Thing", number=f"{__name__}:NOT_A_FACTORY")
    with pytest.raises(InputError, match=problem) as refused:
        check_executor(text)
    assert "\n" not in str(refused.value)


def test_the_local_executor_takes_no_settings(home):
    with pytest.raises(InputError, match="takes no settings"):
        make_executor("local:x=1", ExecutorOptions(home))


def test_serve_refuses_an_unknown_executor_before_it_touches_the_home(tmp_path):
    said = call("serve", "--home", tmp_path / "home", "--executor", "nowhere")
    assert said.code == 2
    known = ", ".join(executor_names())
    assert f"--executor 'nowhere': there is no such executor; known: {known}" in said.err
    assert not (tmp_path / "home").exists()
