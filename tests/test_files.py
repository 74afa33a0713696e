"""Files and folders that appear complete or not at all, and interrupts that wait."""

import json
import os
import signal
import threading

import pytest

from carpool.errors import InputError
from carpool.files import results_in, whole_file, write_csv, write_json
from carpool.interrupts import uninterrupted
from tests.support.command_line import everything_in


def test_results_appear_at_the_end(tmp_path):
    target = tmp_path / "deep" / "out"
    with results_in(target) as folder:
        (folder / "a.txt").write_text("new")
        assert not (target / "a.txt").exists()
    assert everything_in(tmp_path) == {"deep", "deep/out", "deep/out/a.txt"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, InputError])
def test_a_failure_leaves_nothing(tmp_path, error):
    def fail() -> None:
        with results_in(tmp_path / "deep" / "out") as folder:
            (folder / "a.txt").write_text("half")
            raise error("no")

    with pytest.raises(error):
        fail()
    assert everything_in(tmp_path) == set()


def test_a_failure_keeps_existing_files(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").write_text("old")
    for name in ("empty", "out"):
        with pytest.raises(ValueError), results_in(tmp_path / name) as folder:  # noqa: PT012
            (folder / "a.txt").write_text("half")
            raise ValueError
    assert everything_in(tmp_path) == {"empty", "out", "out/a.txt"}
    assert (tmp_path / "out" / "a.txt").read_text() == "old"


def test_files_of_the_same_name_are_replaced_and_others_kept(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "b.txt").write_text("mine")
    with results_in(tmp_path) as folder:
        (folder / "a.txt").write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert everything_in(tmp_path) == {"a.txt", "b.txt"}


def test_a_folder_in_the_way_of_a_result_changes_nothing(tmp_path):
    (tmp_path / "b.txt").mkdir()
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(InputError, match="in the way"), results_in(tmp_path) as folder:  # noqa: PT012
        (folder / "a.txt").write_text("new")
        (folder / "b.txt").write_text("new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert everything_in(tmp_path) == {"a.txt", "b.txt"}


@pytest.mark.parametrize("place", ["file", "file/below", "file/below/deep"])
def test_a_path_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "file").write_text("a regular file")
    with pytest.raises(InputError, match="cannot write there"), results_in(tmp_path / place):
        pytest.fail("must not come here")
    with pytest.raises(InputError, match="cannot write there"), whole_file(tmp_path / "file" / "below.csv"):
        pytest.fail("must not come here")
    assert everything_in(tmp_path) == {"file"}


def test_a_full_disk_is_an_error_of_one_line(tmp_path):
    with pytest.raises(InputError, match="No space left"), results_in(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    with pytest.raises(InputError, match="No space left"), whole_file(tmp_path / "a.csv"):
        raise OSError(28, "No space left on device")
    assert everything_in(tmp_path) == set()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:  # noqa: PT012
        file.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with whole_file(path) as file:
        file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert everything_in(tmp_path) == {"a.csv"}
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("real.csv")
    with whole_file(tmp_path / "link.csv") as file:
        file.write("new")
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(tmp_path / "pipe") as file:
        file.write("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo(), "it must not be replaced by a file"


def test_a_folder_is_refused_as_a_file(tmp_path):
    with pytest.raises(InputError, match="cannot write there"), whole_file(tmp_path):
        pytest.fail("must not come here")
    assert everything_in(tmp_path) == set()


@pytest.mark.parametrize("other_threads", [0, 1])
def test_an_interrupt_waits_for_the_end_of_short_steps(other_threads):
    """Also where another thread, such as that of a progress bar, takes the signal."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, args=(20,)) for _ in range(other_threads)]
    for thread in threads:
        thread.start()
    steps = []
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(10_000))
            steps.append("done")
    finally:
        done.set()
    assert steps == ["done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_csv_and_json_files(tmp_path):
    write_csv(tmp_path / "a.csv", ["x", "y"], [[1, "a,b"], [2.5, None]])
    assert (tmp_path / "a.csv").read_bytes() == b'x,y\n1,"a,b"\n2.5,\n'
    write_json(tmp_path / "a.json", {"ξ": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"ξ": 1}
