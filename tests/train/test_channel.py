"""The two files between worker and scheduler: whole or absent, whatever happens in between."""

import json
import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import channel
from carpool.channel import Control, ControlReader, Report, ReportWriter, Shrinking, WorkerStatus

WHOLE = {"min_value": 0, "max_value": 2**31 - 1}
REPORTS = st.builds(
    Report,
    attempt=st.integers(**WHOLE),
    iteration=st.integers(0, 2**63 - 1),
    seconds=st.floats(0, 1e6),
    samples_per_second=st.floats(0, 1e9),
    accumulation=st.integers(1, 2**31 - 1),
    peak_memory=st.integers(0, 2**60),
    reserved_memory=st.integers(0, 2**60),
    checkpoint=st.integers(-1, 2**62),
    checkpoints_taken=st.integers(**WHOLE),
    control=st.integers(**WHOLE),
    time=st.floats(0, 1e10),
    out_of_memory=st.integers(**WHOLE),
    status=st.sampled_from(WorkerStatus),
    shrinking=st.sampled_from(Shrinking),
    needs_alone=st.booleans(),
    note=st.text(max_size=60),
)


@given(REPORTS)
def test_a_report_comes_back_as_it_was(report):
    assert channel._unpack(channel.pack(report, 7)) == (7, report)


def test_a_long_note_is_cut_between_characters(tmp_path):
    ReportWriter(tmp_path).write(Report(note="ξ" * 500))
    note = channel.read_report(tmp_path).note
    assert note.startswith("ξξξ")
    assert note.endswith("…")
    assert len(note.encode()) <= 240


@given(
    st.builds(
        Control,
        sequence=st.integers(**WHOLE),
        accumulation=st.integers(1, 4096),
        checkpoint=st.integers(**WHOLE),
        stop=st.booleans(),
        can_shrink=st.sampled_from([None, True, False]),
    )
)
def test_a_control_comes_back_as_it_was(tmp_path_factory, control):
    directory = tmp_path_factory.mktemp("worker")
    channel.write_control(directory, control)
    assert channel.read_control(directory) == control


def test_the_newest_record_wins_and_a_torn_one_is_passed_over(tmp_path):
    writer = ReportWriter(tmp_path)
    for iteration in range(5):
        writer.write(Report(iteration=iteration))
    assert channel.read_report(tmp_path).iteration == 4
    data = bytearray((tmp_path / channel.REPORT).read_bytes())
    data[channel._SLOT * (5 % 2) + 40] ^= 0xFF  # the slot of the fifth record
    (tmp_path / channel.REPORT).write_bytes(data)
    assert channel.read_report(tmp_path).iteration == 3


def test_a_restart_in_the_same_directory_beats_the_old_records(tmp_path):
    first = ReportWriter(tmp_path)
    for _ in range(9):
        first.write(Report(attempt=1, iteration=900))
    first.close()
    ReportWriter(tmp_path).write(Report(attempt=2, iteration=1))
    assert channel.read_report(tmp_path).attempt == 2


def test_nothing_there_is_no_report_and_no_control(tmp_path):
    assert channel.read_report(tmp_path) is None
    assert channel.read_control(tmp_path) is None
    (tmp_path / channel.REPORT).write_bytes(b"short")
    assert channel.read_report(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"accumulation": 0}', '{"accumulation": "two"}', '{"stop": 1.5}', '{"sequence": -1}'],
)
def test_an_unusable_control_leaves_the_previous_one_in_force(tmp_path, text):
    channel.write_control(tmp_path, Control(sequence=1, accumulation=4))
    reader = ControlReader(tmp_path)
    assert reader.read().accumulation == 4
    (tmp_path / channel.CONTROL).write_text(text)
    assert reader.read().accumulation == 4
    channel.write_control(tmp_path, Control(sequence=2, accumulation=8))
    assert reader.read().accumulation == 8


def test_a_newer_scheduler_may_say_more(tmp_path):
    (tmp_path / channel.CONTROL).write_text(json.dumps({"sequence": 3, "accumulation": 2, "colour": "blue"}))
    assert channel.read_control(tmp_path) == Control(sequence=3, accumulation=2)


def _scribble(directory, stop):
    writer = ReportWriter(directory)
    i = 0
    while not stop.is_set():
        i += 1
        writer.write(Report(iteration=i, peak_memory=i * 3, note=str(i)))


def test_a_reader_never_sees_half_a_record(tmp_path):
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_scribble, args=(tmp_path, stop))
    process.start()
    try:
        seen = []
        while len(seen) < 3000:
            report = channel.read_report(tmp_path)
            if report is not None:
                assert report.peak_memory == 3 * report.iteration
                assert report.note == str(report.iteration)
                seen.append(report.iteration)
        assert seen == sorted(seen)
        assert len(set(seen)) > 5, "the writer must have gone on meanwhile"
    finally:
        stop.set()
        process.join(10)
    assert process.exitcode == 0
