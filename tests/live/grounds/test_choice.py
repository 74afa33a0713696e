"""What `carpool serve --on` refuses before it asks a ground for anything."""

import pytest

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
