"""The belief about pairs against plain Gaussian conditioning, and its limits."""

from itertools import permutations
from math import exp, log, sqrt
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.belief import pairs as module
from carpool.belief.pairs import EPISODE_SD, TOTAL, JobClass, PairBelief, UnknownPairs, job_class
from carpool.policies.sharing.pair import apart, together
from carpool.profile.interference import read_interference
from tests.support.effort import cases

EPISODE = 1.0 / EPISODE_SD**2
kinds = st.builds(JobClass, st.sampled_from(["bert", "ncf", "yolov3"]), st.integers(2, 4))
cells = st.tuples(kinds, kinds)
logs = st.floats(-0.3, 2.5)


def nothing(cell):
    return None


def two(cell):
    return log(2.0)


def after(observations, prior=two):
    belief = PairBelief(prior)
    for cell, y in observations:
        belief.row(cell).known.add(y, EPISODE)
        belief.take_up()
    return belief


def alike(one, other):
    """The covariance as it was found, term by term."""
    (a, b), (c, d) = one, other
    own, mate, own_family, mate_family = a == c, b == d, a.family == c.family, b.family == d.family
    return (
        0.02 * own
        + 0.04 * own_family
        + 0.03 * mate
        + 0.07 * mate_family
        + 0.04 * (own_family and mate_family)
        + 0.02 * (own and mate_family)
        + 0.03 * (own_family and mate)
        + 0.02 * (own and mate)
    )


def conditioned(observations, asked, prior):
    """Mean and variance by conditioning the whole Gaussian at once, one row for each episode."""
    seen = {}
    for cell, y in observations:
        seen.setdefault(cell, []).append(y)
    weight = {cell: 0.27 / (0.27 + 0.01 / len(ys)) for cell, ys in seen.items()}
    squares = {cell: (np.mean(ys) - prior(cell)) ** 2 - 0.01 / len(ys) for cell, ys in seen.items()}
    excess = sum(weight[cell] * max(0.0, square) for cell, square in squares.items())
    variance = (4 * 0.27 + excess) / (4 + sum(weight.values()))
    scale = 2.0 ** (round(2 * np.log2(variance / 0.27)) / 2)
    where = [cell for cell, _ in observations]
    joint = scale * np.array([[alike(one, other) for other in where] for one in where]) + 0.01 * np.eye(len(where))
    across = scale * np.array([alike(asked, other) for other in where])
    residuals = np.array([y - prior(cell) for cell, y in observations])
    mean = prior(asked) + across @ np.linalg.solve(joint, residuals)
    return mean, scale * alike(asked, asked) - across @ np.linalg.solve(joint, across)


@settings(max_examples=cases(150))
@given(st.lists(st.tuples(cells, logs), min_size=1, max_size=14), cells)
def test_the_update_is_gaussian_conditioning(observations, asked):
    seen = {}
    observations = [o for o in observations if seen.setdefault(o[0], []).append(1) or len(seen[o[0]]) <= 4]

    def prior(cell):
        return 0.3 + 0.1 * cell[0].size

    belief = after(observations, prior)
    mean, variance = conditioned(observations, asked, prior)
    assert belief.mean(asked) == pytest.approx(mean, abs=1e-9)
    assert belief.variance(asked) == pytest.approx(variance, abs=1e-9)


def test_one_pair_follows_the_scalar_update():
    cell = (JobClass("a", 3), JobClass("b", 3))
    random, m, v = Random(3), log(2.0), TOTAL
    belief = PairBelief(two)
    for _ in range(4):
        y = log(2.0) + sqrt(TOTAL) * random.choice([0.95, 1.05])  # of about the variance that the scale starts with
        gain = v / (v + 0.10**2)
        m += gain * (y - m)
        v *= 1.0 - gain
        belief.row(cell).known.add(y, EPISODE)
        belief.take_up()
        assert belief.mean(cell) == pytest.approx(m, abs=1e-12)
        assert belief.variance(cell) == pytest.approx(v, abs=1e-12)


def test_the_order_of_observations_does_not_matter():
    observations = [
        ((JobClass("a", 3), JobClass("b", 3)), 0.9),
        ((JobClass("b", 3), JobClass("a", 3)), 0.1),
        ((JobClass("a", 4), JobClass("b", 3)), 0.7),
        ((JobClass("a", 3), JobClass("b", 3)), 1.1),
    ]
    asked = (JobClass("a", 5), JobClass("b", 4))
    for prior in (two, nothing):
        means = [after(order, prior).mean(asked) for order in permutations(observations)]
        assert max(means) - min(means) < 1e-12


@settings(max_examples=cases(60))
@given(st.lists(st.tuples(cells, logs), max_size=12), cells, st.sampled_from([two, nothing, lambda cell: 0.0]))
def test_a_slowdown_is_never_below_one(observations, asked, prior):
    assert after(observations, prior).xi(asked) >= 1.0


class TestNothingKnown:
    def test_two_unknown_families_get_the_default(self):
        assert 1.75 <= PairBelief(nothing).xi((JobClass("a", 3), JobClass("b", 3))) <= 2.0

    def test_the_mean_and_the_spread_of_what_was_observed_is_expected_of_other_pairs(self):
        pairs = [(JobClass(f"a{n}", 3), JobClass(f"b{n}", 3)) for n in range(40)]
        asked = (JobClass("x", 3), JobClass("y", 3))
        alike = after([(pair, 0.2) for pair in pairs], nothing)
        assert log(1.2) < alike.mean(asked) < log(1.3)
        apart = after([(pair, 0.8 * (n % 2)) for n, pair in enumerate(pairs)], nothing)
        assert alike.variance(asked) < 0.05 < apart.variance(asked) < PairBelief(nothing).variance(asked)

    def test_a_mechanism_sets_what_is_expected(self):
        belief = PairBelief(nothing, UnknownPairs(log(1.2), 0.19))
        cell = (JobClass("a", 3), JobClass("b", 3))
        assert belief.xi(cell) == pytest.approx(1.32)
        assert belief.variance(cell) == pytest.approx(0.19**2)
        belief.row(cell).known.add(log(1.8), EPISODE)
        belief.take_up()
        assert belief.mean(cell) == pytest.approx(log(1.2) + 0.19**2 / (0.19**2 + 0.01) * log(1.5), rel=0.1)

    def test_a_family_never_seen_counts_as_worse_until_it_is_seen(self):
        cell, other = (JobClass("a", 3), JobClass("b", 3)), (JobClass("a", 3), JobClass("new", 3))
        belief = after([(cell, log(2.0))])
        assert belief.xi(cell) == pytest.approx(2.0)
        assert belief.xi(other) == pytest.approx(2.2)
        assert after([(cell, log(2.0)), (other, log(2.0))]).xi(other) == pytest.approx(2.0)


class TestRelatives:
    seen = (JobClass("bert", 3), JobClass("ncf", 10))

    def moved(self, *cell):
        return after([(self.seen, log(4.0))]).mean(cell) - log(2.0)

    def test_closer_relatives_learn_more(self):
        itself = self.moved(*self.seen)
        other_size = self.moved(JobClass("bert", 4), JobClass("ncf", 10))
        same_families = self.moved(JobClass("bert", 4), JobClass("ncf", 12))
        same_mate = self.moved(JobClass("yolov3", 3), JobClass("ncf", 10))
        same_self = self.moved(JobClass("bert", 3), JobClass("yolov3", 3))
        assert log(2.0) > itself > other_size > same_families > same_mate > same_self > 0.0

    def test_unrelated_cells_learn_nothing(self):
        assert self.moved(JobClass("yolov3", 3), JobClass("imagenet", 7)) == 0.0

    def test_slowing_others_and_being_slowed_are_separate(self):
        assert self.moved(JobClass("ncf", 10), JobClass("bert", 3)) == 0.0


def test_job_classes_are_models_at_about_one_sub_batch():
    assert job_class("bert", 12) == job_class("bert", 16) != job_class("bert", 24)
    assert job_class("bert", 0) == JobClass("bert", 0)


def test_old_episodes_fade():
    cell = (JobClass("a", 3), JobClass("b", 3))
    belief = after([(cell, 0.1)] * 50 + [(cell, 1.0)] * 12)
    assert belief.mean(cell) == pytest.approx(1.0, abs=0.1)


def test_cells_beyond_the_limit_learn_from_their_own_episodes_only(monkeypatch):
    monkeypatch.setattr(module, "MOST_CELLS", 2)
    first = [((JobClass("a", 3), JobClass("b", 3)), 1.0), ((JobClass("b", 3), JobClass("a", 3)), 1.0)]
    late = (JobClass("a", 3), JobClass("b", 9))
    before = after(first)
    m, v = before.mean(late), before.variance(late)
    belief = after([*first, (late, 0.2)])
    # the size of residuals follows from all cells; it must not have changed for this comparison
    assert belief._scale == before._scale
    assert belief.mean(late) == pytest.approx(m + v / (v + 0.01) * (0.2 - m))
    assert belief.variance(late) == pytest.approx(v * (1 - v / (v + 0.01)))
    assert belief.mean((JobClass("a", 4), JobClass("b", 9))) == pytest.approx(
        before.mean((JobClass("a", 4), JobClass("b", 9)))
    )


def right_decisions(episodes, noise):
    """How often Theorem 1 says the same as with the true ξ, over pairs of the Gavel table and all lengths."""
    table, random, right, asked = read_interference("gavel"), Random(7), 0, 0
    for _ in range(60):
        for host, guest in table.cells:
            true = [table.pair(host, 1, guest, 1), table.pair(guest, 1, host, 1)]
            believed = []
            for (a, b), xi in zip(((host, guest), (guest, host)), true, strict=True):
                cell = (JobClass(a, 3), JobClass(b, 3))
                ys = [log(xi) + random.gauss(0.0, noise) for _ in range(episodes)]
                believed.append(max(1.0, exp(after([(cell, y) for y in ys]).mean(cell))))
            length = exp(random.uniform(-2.0, 2.0))
            verdicts = [together(length, 1.0, *xis) < apart(length, 1.0) for xis in (true, believed)]
            right += verdicts[0] == verdicts[1]
            asked += 1
    return right / asked


def test_two_episodes_give_right_decisions():
    """Two as noisy as episodes are, or one that is measured well: 95 % right."""
    assert right_decisions(2, 0.10) >= 0.95
    assert right_decisions(1, 0.05) >= 0.95
    assert right_decisions(0, 0.0) < 0.9, "the prior alone is not enough"
