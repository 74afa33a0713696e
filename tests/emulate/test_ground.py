"""Emulated GPUs on nodes: which ground they come from, and that the agents of any ground get to know them."""

import os
import subprocess
import sys
import time

import pytest

from carpool.emulate.gpus import parse_gpus
from carpool.errors import InputError
from carpool.live.agent.main import make_agent
from carpool.live.agent.pilot import settings_of
from carpool.live.commands.serve_ground import FIELDS, take_emulated, take_ground
from carpool.live.executors.node import open_node
from carpool.live.grounds.base import JoinTicket
from carpool.live.grounds.emulated import ENDING, EmulatedGround, EmulatedWitness
from carpool.live.home import Home, write_private
from carpool.live.rank import boot_id, start_ticks

OPTIONS = {"gpus": None, "profile": None, "executor": "local", "mps": True, "ground": None}


def chosen(home: Home, text: str, **more):
    options = {**OPTIONS, **dict.fromkeys(FIELDS), "join_url": (), "emulate": text, **more}
    choice = take_ground(options, take_emulated(options, home))
    return choice, options


@pytest.mark.parametrize(
    ("text", "ground", "name", "nodes", "executor"),
    [
        ("t4:1x4", None, "", (1, 1), "local"),
        ("t4:3x4", None, "emulated", (3, 3), "agents:lease=1m"),
        ("t4:4x4", "slurm", "slurm", (4, 4), "agents:lease=1m"),
        ("t4:1x4", "ray", "ray", (1, 1), "agents:lease=1m"),
    ],
)
def test_several_nodes_come_from_a_ground_and_one_node_is_this_machine(tmp_path, text, ground, name, nodes, executor):
    choice, options = chosen(Home(tmp_path), text, ground=ground)
    assert (choice.name, choice.nodes, options["executor"]) == (name, nodes, executor)
    assert options["emulated"] == str(tmp_path / "emulated" / "gpus.json")
    assert not name or choice.emulated == options["emulated"]


def test_options_that_emulation_decides_are_refused(tmp_path):
    with pytest.raises(InputError, match="--gpus: --emulate says it already"):
        chosen(Home(tmp_path), "t4:1x4", gpus=2)
    with pytest.raises(InputError, match="--nodes: --emulate says it already"):
        chosen(Home(tmp_path), "t4:2x2", nodes="9")
    with pytest.raises(InputError, match="memory= is there twice"):
        chosen(Home(tmp_path), "t4:2x2,memory=1GB,memory=2GB")


def test_an_agent_of_any_ground_has_the_emulated_gpus_of_its_ticket(tmp_path):
    gpus = parse_gpus("t4:4x3:60,memory=11GB")
    path = str(gpus.write(tmp_path / "emulated"))
    ticket = JoinTicket("pilot", ("http://127.0.0.1:1",), "token", home=str(tmp_path / "agents"), emulated=path)
    agent = make_agent(settings_of(ticket, "slurm", "node7", {}))
    node = open_node(agent._executor_options())
    assert [slot.label for slot in node.slots] == ["node7:0", "node7:1", "node7:2"]
    assert {slot.device for slot in node.slots} == {"emulated NVIDIA T4 at 60× speed"}
    assert (node.memory, node.mechanism) == (11 * 10**9, "logical")


def test_an_agent_is_wanted_while_its_record_and_a_service_are_there(tmp_path, monkeypatch):
    record, home = tmp_path / f"pilot{ENDING}", Home(tmp_path)
    witness = EmulatedWitness(str(record), str(home.address))
    assert witness.wanted(1.0) is False
    record.touch()
    home.write_address("http://127.0.0.1:1")
    assert witness.wanted(1.0) is True
    home.remove_address()
    assert witness.wanted(1.0) is True
    later = time.monotonic() + 601
    monkeypatch.setattr("carpool.live.grounds.emulated.time.monotonic", lambda: later)
    assert witness.wanted(1.0) is False


@pytest.mark.parametrize("idle", [True, False])
async def test_a_service_that_ends_takes_idle_agents_with_it_and_no_others(tmp_path, idle):
    ground = EmulatedGround(1, tmp_path, tmp_path / "address.json", lambda: idle)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            text = f'{{"node": "node0", "pid": {child.pid}, "start": {start_ticks(child.pid)}, "boot": "{boot_id()}"}}'
            write_private(tmp_path / f"one{ENDING}", text)
            assert [(pilot.id, pilot.node, pilot.alive) for pilot in await ground.pilots()] == [("one", "node0", True)]
            await ground.close()
            if idle:
                assert child.wait(10) == -9
            else:
                assert child.poll() is None
                os.kill(child.pid, 0)
        finally:
            child.kill()
