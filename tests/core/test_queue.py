"""The queue against a plain sort."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.queue import Queue
from carpool.core.ranked_queue import RankedQueue
from carpool.core.record import JobRecord
from carpool.core.shapes import Shape
from carpool.core.tenants import Tenants
from tests.support.world import job


def scans_like_a_plain_sort(queue, entries, shapes, data) -> None:
    """Compare a scan that skips some shapes with sorted entries; the last item of an entry is its record."""
    largest = data.draw(st.sampled_from([None, 0, 1, 2]))
    hopeless = {shape for shape in shapes if data.draw(st.booleans())}
    seen, scan = [], queue.scan(largest)
    for record in scan:
        seen.append(record)
        if record.shape in hopeless:
            scan.skip_alike()
    wanted, passed = [], set()
    for *_, record in sorted(entries, key=lambda entry: entry[:-1]):
        if (largest is None or record.shape.gpus <= largest) and record.shape not in passed:
            wanted.append(record)
            if record.shape in hopeless:
                passed.add(record.shape)
    assert seen == wanted


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)), max_size=40), st.data())
def test_a_scan_is_a_plain_sort_without_the_skipped_jobs(jobs, data):
    queue, shapes, records = Queue(), {}, []
    asked_before = data.draw(st.booleans()) and (queue.in_order, queue.by_patience(9.0))
    for number, (gpus, priority, key) in enumerate(jobs):
        shape = shapes.setdefault((gpus, priority), Shape(gpus, priority, False, None, None, (), None))
        submitted, left = (data.draw(st.floats(0.0, 1e4)) for _ in range(2))
        record = JobRecord(job(str(number), left=left, submitted=submitted), shape, number, 1.0)
        queue.add(record, (float(key),))
        records.append((-priority, key, number, record))
    for *_, record in data.draw(st.lists(st.sampled_from(records), unique_by=id)) if records else ():
        record.alone_iteration_s = 2.0  # it need not stay where it is from the moment on at which it is removed
        queue.remove(record)
        records = [entry for entry in records if entry[3] is not record]
    scans_like_a_plain_sort(queue, records, shapes.values(), data)
    assert len(queue) == len(records)
    assert [entry[2] for entry in queue.in_order] == [number for *_, number, _ in sorted(records)]
    by_patience = [record.job.submitted + 9.0 * record.alone_left(0.0) for *_, record in records]
    assert [moment for moment, *_ in queue.by_patience(9.0)] == sorted(by_patience)
    assert asked_before in (False, (queue.in_order, queue.by_patience(9.0))), "one list, kept"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3), st.integers(0, 9)), max_size=40),
    st.lists(st.integers(-2, 2), min_size=4, max_size=4),
    st.data(),
)
def test_a_scan_of_a_ranked_queue_is_a_plain_sort_by_the_tiers_of_groups(jobs, tiers, data):
    tenants = Tenants()
    for number, tier in enumerate(tiers):
        tenants.group(f"g{number}").tier = tier
    queue, shapes, entries = RankedQueue(tenants), {}, []
    for number, (gpus, priority, group, key) in enumerate(jobs):
        shape = shapes.setdefault(
            (gpus, priority, group), Shape(gpus, priority, False, None, "", (), None, f"g{group}")
        )
        record = JobRecord(job(str(number)), shape, number, 1.0)
        queue.add(record, (float(key),))
        entries.append((-priority, tiers[group], key, number, record))
    scans_like_a_plain_sort(queue, entries, shapes.values(), data)
