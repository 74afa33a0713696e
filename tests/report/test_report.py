"""Reports: who was on which GPU when, folders that appear whole or not at all, pictures, tables."""

import json
import os
import re
import signal
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Job
from carpool.errors import InputError
from carpool.files import results_in, whole_file, write_csv, write_json
from carpool.interrupts import uninterrupted
from carpool.report import plots
from carpool.report.folders import write_comparison, write_run
from carpool.report.tables import HOURS, comparison_json, comparison_tables, run_tables
from carpool.report.timeline import Segment, segments
from carpool.sim import Setup, simulate
from carpool.sim.sweep import SweepCase, run_all
from carpool.sim.workload import Workload
from tests.support.command_line import everything_in

GPUS, JOBS = 4, 5

# ---- the timeline --------------------------------------------------------------------------------------------------


class Launches:
    """Where each job is and how often it was launched, told by the rules of the events and in no hurry."""

    def __init__(self) -> None:
        self.gpus: dict[str, tuple[int, ...]] = {}
        self.attempt: dict[str, int] = {}

    def apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.Planned):
            for decision in event.decisions:
                gpus = decision.allocation.gpus if decision.allocation else ()
                if gpus and gpus != self.gpus.get(decision.job, ()):
                    self.attempt[decision.job] = self.attempt.get(decision.job, 0) + 1
                self.gpus[decision.job] = gpus
        elif isinstance(event, ev.Finished | ev.Failed | ev.Stopped) and event.attempt == self.attempt.get(event.job):
            self.gpus[event.job] = ()


@st.composite
def histories(draw) -> list[ev.Event]:
    """Plans and endings at whole seconds, as a driver could log them; some endings are those of earlier launches."""
    now, log, launches = 0.0, [], Launches()
    names = st.integers(0, JOBS - 1).map("j{}".format)
    places = st.lists(st.integers(0, GPUS - 1), min_size=1, max_size=3, unique=True).map(tuple)
    for _ in range(draw(st.integers(0, 12))):
        now += draw(st.integers(0, 3))
        kind = draw(st.sampled_from(["plan", "plan", "plan", "finish", "fail", "stop", "start"]))
        name = draw(names)
        attempt = max(0, launches.attempt.get(name, 0) - draw(st.sampled_from([0, 0, 1])))
        if kind == "plan":
            decisions = []
            for job in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
                held = launches.gpus.get(job, ())
                gpus = draw(st.sampled_from([draw(places), draw(places), held, ()]))  # start or move, re-tune, stop
                decisions.append(Decision(job, Allocation(gpus, draw(st.integers(1, 2))) if gpus else None, "because"))
            log.append(ev.Planned(now, tuple(decisions)))
        elif kind == "fail":
            log.append(ev.Failed(now, name, attempt, "x"))
        elif kind == "stop":
            log.append(ev.Stopped(now, name, attempt, 0.0))
        else:
            log.append((ev.Finished if kind == "finish" else ev.Started)(now, name, attempt))
        launches.apply(log[-1])
    # in the end everybody leaves, or the last stretch would have no end
    log += [ev.Finished(now + 1, job, attempt) for job, attempt in launches.attempt.items()]
    return log


def second_by_second(log: list[ev.Event]) -> dict[tuple[int, int], frozenset[str]]:
    """Who is on a GPU during each second, by playing the log again for every second."""
    seen = {}
    for second in range(int(log[-1].at) if log else 0):
        launches = Launches()
        for event in log:
            if event.at <= second:
                launches.apply(event)
        for gpu in range(GPUS):
            jobs = frozenset(job for job, gpus in launches.gpus.items() if gpu in gpus)
            if jobs:
                seen[gpu, second] = jobs
    return seen


@given(histories())
def test_segments_agree_with_a_second_by_second_account(log):
    found = segments(log)
    account = {}
    for segment in found:
        assert segment.start < segment.end
        assert len(set(segment.jobs)) == len(segment.jobs) > 0
        for second in range(int(segment.start), int(segment.end)):
            assert (segment.gpu, second) not in account, "no two stretches of a GPU overlap"
            account[segment.gpu, second] = frozenset(segment.jobs)
    assert account == second_by_second(log)
    assert found == sorted(found, key=lambda segment: (segment.start, segment.gpu))


def test_segments_of_a_shared_gpu():
    log = [
        ev.Planned(0.0, (Decision("a", Allocation((0, 1)), "first"),)),
        ev.Planned(5.0, (Decision("b", Allocation((1,)), "joins"),)),
        ev.Finished(7.0, "b", 1),
        ev.Finished(9.0, "a", 1),
    ]
    assert segments(log) == [
        Segment(0, 0.0, 9.0, ("a",)),
        Segment(1, 0.0, 5.0, ("a",)),
        Segment(1, 5.0, 7.0, ("a", "b")),
        Segment(1, 7.0, 9.0, ("a",)),
    ]


def test_a_retuned_job_keeps_its_lane():
    log = [
        ev.Planned(0.0, (Decision("a", Allocation((0,)), "first"), Decision("b", Allocation((0,)), "joins"))),
        ev.Planned(5.0, (Decision("a", Allocation((0,), 4), "smaller sub-batch"),)),
        ev.Finished(7.0, "b", 1),
        ev.Finished(9.0, "a", 1),
    ]
    assert segments(log) == [Segment(0, 0.0, 7.0, ("a", "b")), Segment(0, 7.0, 9.0, ("a",))]


def test_a_lost_node_empties_its_gpus():
    log = [
        ev.NodeJoined(0.0, ev.Node("n0", (0,), 1)),
        ev.NodeJoined(0.0, ev.Node("n1", (1,), 1)),
        ev.Planned(0.0, (Decision("a", Allocation((0, 1)), "x"), Decision("b", Allocation((1,)), "x"))),
        ev.NodeLost(4.0, "n0"),
        ev.Finished(6.0, "b", 1),
    ]
    assert segments(log) == [
        Segment(0, 0.0, 4.0, ("a",)),
        Segment(1, 0.0, 4.0, ("a", "b")),
        Segment(1, 4.0, 6.0, ("b",)),
    ]


def test_segments_agree_with_the_busy_time_of_a_run():
    jobs = [Job(f"j{n}", 3.0 * n, "generic", 1 + n % 3, 1, 50, duration_s=50.0 + n) for n in range(12)]
    for policy in ("fifo", "tiresias:threshold_gpu_s=60,restart_s=5", "sjf-ffs", "sjf-bsbf"):
        log: list[ev.Event] = []
        result = simulate(jobs, policy, Setup(cluster="1x4", memory_limit=False), log=log.append)
        busy = sum(segment.end - segment.start for segment in segments(log))
        assert busy == pytest.approx(result.state.busy_gpu_s), policy


# ---- folders and files ---------------------------------------------------------------------------------------------


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


def test_a_failure_leaves_what_was_there(tmp_path):
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
def test_a_place_that_cannot_be_written(tmp_path, place):
    (tmp_path / "file").write_text("a regular file")
    with pytest.raises(InputError, match="cannot write there"), results_in(tmp_path / place):
        pytest.fail("must not come here")
    with pytest.raises(InputError, match="cannot write there"), whole_file(tmp_path / "file" / "below.csv"):
        pytest.fail("must not come here")
    assert everything_in(tmp_path) == {"file"}


def test_a_full_disk_is_told_in_one_line(tmp_path):
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


def test_a_folder_is_no_file_to_write(tmp_path):
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


# ---- pictures ------------------------------------------------------------------------------------------------------


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert data.rstrip()[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_colours_are_unique_and_a_policys_own():
    five = ["fifo", "sjf", "tiresias", "sjf-ffs", "sjf-bsbf"]
    chosen = plots.colours(five, plots.POLICY_COLOURS)
    assert chosen == {name: plots.POLICY_COLOURS[name] for name in five}
    for names in (["sjf:skip=false", "sjf"], ["sjf", "sjf:skip=false"]):
        both = plots.colours(names, plots.POLICY_COLOURS)
        assert both["sjf"] == plots.POLICY_COLOURS["sjf"], "whoever stands first"
        assert both["sjf:skip=false"] != both["sjf"]
    assert plots.colours(["sjf:skip=false"], plots.POLICY_COLOURS) == {"sjf:skip=false": plots.POLICY_COLOURS["sjf"]}


names = st.sampled_from([*plots.POLICY_COLOURS, "sjf:skip=false", "fifo:skip=true"]) | st.text(max_size=4)


@given(st.lists(names, unique=True, max_size=60))
def test_no_two_names_have_one_colour_however_many_there_are(chosen):
    palette = plots.colours(chosen, plots.POLICY_COLOURS)
    assert list(palette) == chosen
    assert len(set(palette.values())) == len(chosen)
    assert all(len(colour) == 7 and colour[0] == "#" and int(colour[1:], 16) >= 0 for colour in palette.values())
    assert palette == plots.colours(chosen, plots.POLICY_COLOURS)


def test_hundreds_of_models_have_colours():
    assert len(set(plots.colours([f"model{n}" for n in range(300)], plots.MODEL_COLOURS).values())) == 300


@pytest.mark.parametrize("jobs", [1, 2, 30])
def test_the_pictures_of_a_run(tmp_path, jobs):
    load = [Job(f"j{n}", 5.0 * n, f"m{n % 9}", 1 + n % 2, 1, 50, duration_s=50.0) for n in range(jobs)]
    load = [Job(j.id, j.submitted, "generic", j.gpus, 1, 50, duration_s=50.0) for j in load]
    log: list[ev.Event] = []
    result = simulate(load, "sjf-ffs", Setup(cluster="1x4", memory_limit=False), log=log.append)
    write_run(tmp_path, result, log)
    for name in ("gantt.png", "jct_cdf.png", "queue_by_model.png"):
        width, height = size_of(tmp_path / name)
        assert 500 < width < 3000
        assert 300 < height < 3000
    assert everything_in(tmp_path) == {
        *("summary.json", "jobs.csv", "events.jsonl", "gantt.png", "jct_cdf.png", "queue_by_model.png"),
    }


def test_a_shared_gpu_can_be_seen_in_the_gantt(tmp_path):
    """The row of a GPU with two jobs is split: two colours above each other where otherwise there is one."""
    import numpy as np
    from matplotlib.image import imread

    alone = [Segment(0, 0.0, 3600.0, ("a",))]
    shared = [Segment(0, 0.0, 3600.0, ("a", "b"))]
    models = {"a": "bert", "b": "ncf"}
    found = []
    for number, what in enumerate((alone, shared)):
        plots.gantt(tmp_path / f"{number}.png", what, models, 1, "one GPU")
        pixels = np.rint(imread(tmp_path / f"{number}.png")[:, :, :3] * 255).astype(int)
        column = pixels[:, pixels.shape[1] // 3]
        found.append({"#{:02X}{:02X}{:02X}".format(*pixel) for pixel in column})
    assert plots.MODEL_COLOURS["bert"] in found[0]
    assert plots.MODEL_COLOURS["ncf"] not in found[0]
    assert {plots.MODEL_COLOURS["bert"], plots.MODEL_COLOURS["ncf"]} <= found[1]


def test_a_gantt_of_too_many_stretches_ends_where_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MOST_BARS", 3)
    stretches = [Segment(0, 3600.0 * n, 3600.0 * (n + 1), ("a",)) for n in range(9)]
    assert plots._span(stretches[:3], cut=True) == (0.0, 2.0)
    assert plots._span(stretches, cut=False) == (0.0, 9.0)
    assert plots._span(stretches[5:], cut=False) == (5.0, 9.0), "no hours of nothing at the left"
    plots.gantt(tmp_path / "g.png", stretches, {"a": "bert"}, 1, "title")
    size_of(tmp_path / "g.png")


def test_pictures_of_nothing_much(tmp_path):
    plots.gantt(tmp_path / "g.png", [], {}, 4, "nothing ran")
    plots.jct_cdf(tmp_path / "c.png", {"fifo": [0.0]})
    plots.queue_by_model(tmp_path / "q.png", {"fifo": {"bert": 0.0}, "sjf": {}})
    plots.mean_jct(tmp_path / "m.png", {"case": {"fifo": (0.0, None)}})
    for name in "gcqm":
        size_of(tmp_path / f"{name}.png")


def test_without_matplotlib_the_tables_are_written_and_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "available", lambda: False)
    log: list[ev.Event] = []
    result = simulate([Job("a", 0.0, "generic", 1, 1, 5, duration_s=5.0)], "fifo", Setup(cluster="1x1"), log=log.append)
    write_run(tmp_path, result, log)
    assert everything_in(tmp_path) == {"summary.json", "jobs.csv", "events.jsonl"}
    assert "pip install 'carpool[plots]'" in capsys.readouterr().err


# ---- comparisons and tables ----------------------------------------------------------------------------------------


def outcomes(policies=("fifo", "sjf")):
    cases = []
    for label, count in (("few", 4), ("many", 8)):
        for seed in (1, 2):
            jobs = tuple(
                Job(f"j{n}", 1.0 * seed, "generic", 1, 1, 50, duration_s=10.0 * (n + seed)) for n in range(count)
            )
            cases.append(SweepCase(label, str(seed), Workload(jobs)))
    return run_all(policies, cases, Setup(cluster="1x1", memory_limit=False), workers=1)


def test_the_folder_of_a_comparison(tmp_path):
    results = outcomes()
    write_comparison(tmp_path, results)
    assert everything_in(tmp_path) == {
        "comparison.json",
        "runs.csv",
        "jct_cdf.png",
        "queue_by_model.png",
        "mean_jct.png",
    }
    for name in ("jct_cdf.png", "queue_by_model.png", "mean_jct.png"):
        size_of(tmp_path / name)
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert len(lines) == 1 + len(results)
    first = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert (first["policy"], first["case"], first["seed"]) == ("fifo", "few", "1")
    assert float(first["mean_jct_s"]) == results[0].summary.mean_jct_s
    assert float(first["small_mean_jct_s"]) == results[0].summary.small.mean_jct_s


def test_means_over_seeds():
    results = outcomes()
    data = comparison_json(results)
    assert len(data["runs"]) == 8
    assert [(m["case"], m["policy"], m["seeds"]) for m in data["means"]] == [
        (case, policy, 2) for case in ("few", "many") for policy in ("fifo", "sjf")
    ]
    own = [o.summary.mean_jct_s for o in results if (o.case, o.policy) == ("many", "sjf")]
    assert data["means"][3]["mean_jct_s"] == pytest.approx(sum(own) / 2)
    assert data["means"][3]["mean_jct_error_s"] == pytest.approx(abs(own[0] - own[1]) / 2)


@pytest.mark.parametrize("width", [80, 200])
def test_a_comparison_fits_the_window(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    long = "tiresias:threshold_gpu_s=100.5,restart_s=3.25"
    comparison_tables(outcomes(("sjf", long)), Setup())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines), "nothing is cut off"
    assert "sjf" in "".join(lines)
    assert ("host slow-down" in "".join(lines)) == (width == 200)


def test_names_are_never_taken_for_markup(capsys):
    odd = "[/b] [red]x[/red] :smile:"
    result = simulate([Job("a", 0.0, "generic", 1, 1, 5, duration_s=5.0)], "fifo", Setup(cluster="1x1"))
    run_tables(replace(result.summary, policy=odd, workload="w[/].csv"), Setup())
    comparison_tables([replace(o, policy=odd) for o in outcomes(("fifo",))], Setup(profile="[/x]"))
    out = capsys.readouterr().out
    assert out.count(odd) == 3
    assert "w[/].csv" in out
    assert "profile [/x]" in out


def test_hours():
    assert HOURS.show(0) == "0.00"
    assert HOURS.show(5400) == "1.50"
    assert HOURS.show(3_600_000) == "1000"
