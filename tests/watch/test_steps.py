"""What the hook counts and reports, called as PyTorch would call it."""

import gc
import os
import sys
import time
from types import SimpleNamespace

import pytest

from carpool import channel
from carpool.train import link
from carpool.watch import steps
from carpool.watch.steps import StepWatch


class Optimizer:
    """What the hook reads of an optimizer."""

    def __init__(self):
        device = SimpleNamespace(type="cpu")
        self.param_groups = [{"params": [SimpleNamespace(device=device)]}]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: `clock.now += 1`."""
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now, time=lambda: 5.0)
    monkeypatch.setattr(steps, "time", clock)
    monkeypatch.setattr(link, "_links", 0)
    return clock


@pytest.fixture
def watch(tmp_path, clock):
    return StepWatch(str(tmp_path), "3")


def step(watch, clock, optimizer, times=1, seconds=1.0):
    for _ in range(times):
        clock.now += seconds
        watch.stepped(optimizer)


def test_a_report_has_iterations_speed_and_attempt(watch, clock, tmp_path):
    step(watch, clock, Optimizer(), 10, 0.5)
    report = channel.read_report(tmp_path)
    assert (report.attempt, report.iteration, report.seconds, report.watched) == (3, 10, pytest.approx(0.5), True)


def test_the_first_step_is_not_timed_because_it_begins_with_the_script(watch, clock, tmp_path):
    clock.now += 30.0
    step(watch, clock, optimizer := Optimizer(), 1, 0.5)
    assert channel.read_report(tmp_path).seconds == 0.0
    step(watch, clock, optimizer, 1, 0.5)
    assert channel.read_report(tmp_path).seconds == 0.5


def test_only_the_first_optimizer_counts(watch, clock, tmp_path):
    first, second = Optimizer(), Optimizer()
    for _ in range(5):
        step(watch, clock, first)
        step(watch, clock, second, 3)
    assert channel.read_report(tmp_path).iteration == 5


def test_a_new_optimizer_counts_once_the_first_is_gone(watch, clock, tmp_path):
    optimizer = Optimizer()
    step(watch, clock, optimizer, 4)
    del optimizer
    gc.collect()
    step(watch, clock, Optimizer(), 1)
    assert channel.read_report(tmp_path).iteration == 5


def test_a_pause_or_an_evaluation_does_not_count_as_a_slow_step(watch, clock, tmp_path):
    optimizer = Optimizer()
    step(watch, clock, optimizer, 20, 0.1)
    step(watch, clock, optimizer, 1, 600.0)
    step(watch, clock, optimizer, 1, 0.1)
    assert channel.read_report(tmp_path).seconds == pytest.approx(0.1)


def test_quick_steps_are_reported_at_intervals_and_all_at_the_end(watch, clock, tmp_path):
    optimizer = Optimizer()
    step(watch, clock, optimizer, 1000, 0.0001)
    reported = channel.read_report(tmp_path).iteration
    assert 500 <= reported < 1000
    watch.end()
    assert channel.read_report(tmp_path).iteration == 1000


def test_one_process_of_a_worker_reports(watch, clock, tmp_path):
    step(watch, clock, Optimizer(), 4)
    other = StepWatch(str(tmp_path), "3")
    step(other, clock, Optimizer(), 9)
    assert other.off
    assert channel.read_report(tmp_path).iteration == 4


def test_a_forked_child_leaves_the_report_to_its_parent(watch, clock, tmp_path, monkeypatch):
    optimizer = Optimizer()
    step(watch, clock, optimizer, 4)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    step(watch, clock, optimizer, 4)
    assert channel.read_report(tmp_path).iteration == 4


def test_a_script_that_reports_by_itself_is_not_watched(watch, clock, tmp_path, monkeypatch):
    monkeypatch.setenv(channel.ENV_DIRECTORY, str(tmp_path))
    own = link.Link()
    own.say(iteration=2)
    step(watch, clock, Optimizer(), 9)
    assert watch.off
    assert not (tmp_path / channel.WATCH).exists()
    assert channel.read_report(tmp_path).iteration == 2


def test_what_the_library_reports_wins(watch, clock, tmp_path):
    step(watch, clock, Optimizer(), 9)
    channel.ReportWriter(tmp_path).write(channel.Report(iteration=2))
    assert (channel.read_report(tmp_path).iteration, channel.read_report(tmp_path).watched) == (2, False)


def test_whatever_fails_goes_unnoticed(clock, tmp_path, capfd):
    for broken in (str(tmp_path / "missing"), "\0"):
        watch = StepWatch(broken, "one")
        step(watch, clock, Optimizer(), 3)
        assert watch.off
    step(watch := StepWatch(str(tmp_path), ""), clock, object(), 3)
    assert watch.off
    assert capfd.readouterr() == ("", "")


def test_a_step_costs_less_than_20_microseconds(tmp_path):
    """The mean over several seconds' worth of steps of 1 ms, reports included; measured in CPU time."""
    watch, optimizer = StepWatch(str(tmp_path), "1"), Optimizer()
    watch.stepped(optimizer)
    best = min(_cpu_of(watch, optimizer) for _ in range(3))
    assert best < 20e-6, f"{best * 1e6:.1f} µs"


def _cpu_of(watch, optimizer, number=2000):
    began = time.thread_time()
    for index in range(number):
        if index % 50 == 0:
            watch._due = 0.0  # as every 50 ms
        watch.stepped(optimizer)
    return (time.thread_time() - began) / number


def test_a_channel_without_the_package_is_the_same_channel(tmp_path):
    loaded = steps.load_channel()
    assert loaded.__file__ == channel.__file__
    assert loaded is sys.modules["_carpool_channel"] is not channel
