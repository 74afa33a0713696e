"""Simulated ends, the estimate of the queue and predicted ends, each against something slower and simpler."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core import events as ev
from carpool.core.availability import Availability, finish
from carpool.core.model import Status
from carpool.core.shapes import Size
from carpool.core.shared_cells import kind_of
from carpool.policies.joint.cell_speeds import CellSpeeds
from carpool.policies.joint.policy import Carpool
from carpool.policies.joint.queue_estimate import QueueEstimate, queue_sum
from carpool.policies.joint.simulate_ends import Participant, simulate_ends
from carpool.policies.sharing.pair import SharingOption, best, host_needs, pair_ends
from tests.support.situations import situations
from tests.support.world import job, model

lefts = st.floats(1.0, 1000.0)
xis = st.floats(1.0, 4.0)


@given(lefts, lefts, xis)
def test_a_simulated_pair_ends_as_theorem_1_says(host, guest, xi):
    participants = [Participant(guest, job("g"), 1), Participant(host, job("h"), 1)]
    assert simulate_ends(participants, [(0, 1)], model(xi)) == pytest.approx(list(pair_ends(host, guest, xi, xi)))


def slowly(lefts, cells, xi, step=0.01, startup=0.0):
    """Simulate in small steps, for a constant pair ξ that adds up over mates; the first job computes after a while."""
    left, now, ends = list(lefts), 0.0, [0.0] * len(lefts)
    while any(value > 0 for value in left):
        active = {index for index, value in enumerate(left) if value > 0 and (index or now >= startup)}
        now += step
        for index in active:
            worst = max([1 + (xi - 1) * len(active & set(cell) - {index}) for cell in cells if index in cell] + [1.0])
            left[index] -= step / worst
            if left[index] <= 0:
                ends[index] = now
    return ends


@given(lefts, lefts, xis, xis, st.floats(0.0, 300.0))
def test_a_host_is_slowed_down_only_once_the_guest_has_started_up(host, guest, xi, guest_xi, startup):
    option = SharingOption(Size(1, 0, 1.0), xi, guest_xi, 1.0, host_needs(xi, guest_xi, 1.0))
    ends = option.ends(host, guest, startup)
    if host <= startup:
        assert ends == (startup + guest, host), "they never compute at the same time"
    else:
        assert ends == pytest.approx(tuple(startup + end for end in pair_ends(host - startup, guest, xi, guest_xi)))
    verdict = best([option], host, guest, startup)
    worth = host <= startup or best([option], host - startup, guest) is not None
    assert (verdict is not None) == (worth or (startup == 0.0 and best([option], host, guest) is not None))
    if verdict is not None:
        assert verdict.together == pytest.approx(sum(ends))


@pytest.mark.parametrize("seed", range(12))
def test_a_guest_that_starts_up_ends_as_in_small_steps(seed):
    random = Random(seed)
    times, startup = [random.uniform(1.0, 20.0) for _ in range(3)], random.uniform(0.5, 25.0)
    cells, xi = [(0, 1), (0, 2)] if seed % 2 else [(0, 1, 2)], random.choice([1.1, 1.5, 2.0])
    jobs = [job(str(n)) for n in range(3)]
    participants = [Participant(left, one, 1) for left, one in zip(times, jobs, strict=True)]
    expected = pytest.approx(slowly(times, cells, xi, startup=startup), abs=0.1)
    assert simulate_ends(participants, cells, model(xi), startup) == expected
    if not seed % 2:
        speeds = CellSpeeds(jobs[0], Size(1, 0, 1.0), tuple(kind_of(one, 1) for one in jobs[1:]), jobs[1:], model(xi))
        assert speeds.ends_after(times, startup) == expected


@pytest.mark.parametrize("seed", range(12))
def test_several_cells_end_as_in_small_steps(seed):
    random = Random(seed)
    number = random.randint(2, 5)
    times = [random.uniform(1.0, 20.0) for _ in range(number)]
    cells = [(0, *random.sample(range(1, number), random.randint(1, number - 1))) for _ in range(random.randint(1, 3))]
    xi = random.choice([1.1, 1.5, 2.0])
    participants = [Participant(left, job(str(n)), 1) for n, left in enumerate(times)]
    assert simulate_ends(participants, cells, model(xi)) == pytest.approx(slowly(times, cells, xi), abs=0.1)


@given(st.lists(lefts, min_size=3, max_size=4), xis)
def test_a_cell_with_kept_slow_downs_ends_as_simulated(times, xi):
    jobs, perf = [job(str(n)) for n in range(len(times))], model(xi)
    kind = tuple(kind_of(one, 1) for one in jobs[1:])
    speeds = CellSpeeds(jobs[0], Size(1, 0, 1.0), kind, jobs[1:], perf)
    participants = [Participant(left, one, 1) for left, one in zip(times, jobs, strict=True)]
    everyone = range(len(times))
    assert speeds.ends(times, speeds.all) == pytest.approx(simulate_ends(participants, [everyone], perf))
    alone = speeds.ends(times, speeds.hosts)
    assert alone == pytest.approx([0.0, *simulate_ends(participants[1:], [everyone[:-1]], perf)])


def test_a_slow_down_on_other_gpus_ends_in_time():
    alone = Participant(10.0, job("a"), 1, [(4.0, 2.0)])  # 4 s at half speed, then 8 s at full speed
    assert simulate_ends([alone], [], model()) == [pytest.approx(12.0)]
    assert finish(100.0, 10.0, [(104.0, 2.0)]) == pytest.approx(112.0)
    assert finish(100.0, 10.0, [(104.0, 2.0), (200.0, 1.25)]) == pytest.approx(100.0 + 4 + 8 * 1.25)


untils = st.lists(st.tuples(st.floats(0.0, 500.0), xis), max_size=5)


@given(st.lists(st.tuples(lefts, untils), min_size=1, max_size=4))
def test_of_several_slow_downs_elsewhere_the_worst_counts_as_long_as_it_lasts(jobs):
    participants = [Participant(left, job(str(n)), 1, steps) for n, (left, steps) in enumerate(jobs)]
    expected = [finish(0.0, left, steps) for left, steps in jobs]
    assert simulate_ends(participants, [], model()) == pytest.approx(expected)


def naive_queue_sum(moments, waiting, now):
    """Return the sum of completion times, with each GPU kept separately."""
    free, total = sorted(moments), 0.0
    for gpus, left, _, _ in waiting:
        end = max(free[gpus - 1], now) + left
        free = sorted(free[gpus:] + [end] * gpus)
        total += end - now
    return total


@given(
    st.lists(st.integers(0, 50), min_size=4, max_size=12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), max_size=10),
    st.integers(0, 20),
)
def test_the_estimate_of_the_queue_equals_one_gpu_by_gpu(moments, jobs, now):
    available = Availability()
    for moment in moments:
        available.add(float(moment), 1)
    waiting = [(gpus, float(left), seq, 0) for seq, (gpus, left) in enumerate(jobs)]
    assert queue_sum(available.moments, waiting, float(now)) == pytest.approx(naive_queue_sum(moments, waiting, now))


@given(
    st.lists(st.integers(0, 50), min_size=4, max_size=12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), max_size=10),
    st.integers(0, 10),
)
def test_a_copy_of_an_estimate_continues_like_one_from_the_start(moments, jobs, first):
    waiting = [(gpus, float(left), seq, 0) for seq, (gpus, left) in enumerate(jobs)]
    free = sorted(map(float, moments))
    copied = QueueEstimate(free, 5.0).add(waiting[:first]).copy().add(waiting[first:])
    assert copied.sum == QueueEstimate(free, 5.0).add(waiting).sum


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), max_size=4),
    st.lists(st.integers(0, 9), max_size=12),
    st.integers(0, 20),
)
def test_the_first_moments_after_changes_are_those_of_all_moments(changes, others, number):
    available = Availability(
        sorted([float(m) for m in others] + [float(b) for b, _, gpus in changes for _ in range(gpus)])
    )
    changed = available.copy()
    changed.change(changes)
    assert available.first_after(changes, number)[:number] == changed.moments[:number]


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9), st.sampled_from([0.9, 1.0, 1.2, 1.5, 3.0]))
def test_two_jobs_that_share_all_gpus_end_to_the_bit_as_in_the_general_case(left, other_left, xi):
    two = [Participant(left, job("a"), 1), Participant(other_left, job("b"), 1)]
    alone = Participant(0.0, job("c"), 1)  # it has nothing left, so the general case sees no third job
    general = simulate_ends([*two, alone], [[0, 1], [2]], model(xi))
    assert simulate_ends(two, [[0, 1]], model(xi)) == general[:2]


@given(
    st.lists(st.integers(0, 50), min_size=4, max_size=12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), max_size=6),
    st.integers(1, 40),
)
def test_gpus_that_are_free_after_the_last_start_leave_the_estimate_as_it_is(moments, jobs, later):
    waiting = [(gpus, float(left), seq, 0) for seq, (gpus, left) in enumerate(jobs)]
    before = QueueEstimate(sorted(map(float, moments)), 5.0).add(waiting)
    moved = [moment if moment <= before.horizon else before.horizon + later for moment in map(float, moments)]
    assert QueueEstimate(sorted(moved), 5.0).add(waiting).sum == before.sum


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=8), st.randoms())
def test_availability_removes_what_was_added(blocks, random):
    available = Availability()
    for moment, gpus in blocks:
        available.add(float(moment), gpus)
    random.shuffle(blocks)
    for moment, gpus in blocks:
        available.remove(float(moment), gpus)
    assert available.moments == []
    with pytest.raises((ValueError, IndexError)):
        available.remove(3.0, 1)


@given(situation=situations)
def test_end_times_equal_ones_made_from_scratch(situation):
    """The index that events keep up to date, against a new one over the same records."""
    state = situation.state(Carpool().key)
    state.end_times  # noqa: B018 - kept from now on
    for record in list(state.running)[::2]:
        if record.status is Status.RUNNING:
            state.apply(ev.Finished(state.now, record.job.id, record.attempt))
    for record in state.running:
        if record.status is Status.STARTING:
            state.apply(ev.Started(state.now, record.job.id, record.attempt))
    kept = state.end_times
    state._end_times = None
    fresh = state.end_times
    assert kept.ends == fresh.ends
    assert kept.lent.moments == fresh.lent.moments
    assert len(fresh.lent.moments) == len(state.topology.node_of) - state.free.count
