"""What `carpool serve --on` refuses before it asks a ground for anything."""

import pytest

from carpool.live.commands.serve_ground import GroundChoice
from carpool.live.grounds import slurm
from tests.support.command_line import call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--sbatch", "--comment='gpu"),
            '--sbatch "--comment=\'gpu": No closing quotation; write options as in a shell',
        ),
        (("--time-limit", "4m"), "jobs save and move 5 min before a node's end, so none would stay for 4 min"),
        (("--time-limit", "1h", "--save-before", "1h"), "give a longer one, or a shorter --save-before"),
        (("--nodes", "3-1"), "--nodes '3-1'"),
        (("--ray-address", "auto"), "--ray-address: belongs to --on ray"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: f"/usr/bin/{name}")
    refused = call("serve", "--home", tmp_path, "--port", "0", "--on", "slurm", *words)
    assert (refused.code, said in refused.err) == (2, True), refused.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "join_urls", "url", "warns"),
    [
        ("slurm", (), "http://127.0.0.1:8471", True),
        ("ray", (), "https://[::1]:8471", True),
        ("slurm", (), "https://login1:8471", False),
        ("slurm", ("http://127.0.0.1:1",), "http://127.0.0.1:8471", False),  # a tunnel
        ("emulated", (), "http://127.0.0.1:8471", False),
    ],
)
def test_a_service_that_only_its_own_machine_reaches_says_so(name, join_urls, url, warns):
    choice = GroundChoice(name, (1, 2), "", "", None, "", "", join_urls, "", 300.0, 5.0, 300.0)
    assert bool(choice.cannot_join(url)) is warns
