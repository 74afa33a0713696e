"""What hosts offer, and its log, against counting anew."""

import pytest

from carpool.core import offers
from carpool.core.model import Job
from carpool.core.view import HostKind, Offer
from carpool.policies.sharing.bsbf import SjfBsbf
from carpool.sim.engine import Engine
from tests.support.world import job, model, nodes

LEAST = (0.0, 3.0, 17.0, 100.0)
"""Times left that a guest may ask for."""


def lasting(state, least):
    """Count the GPUs whose hosts may have so much left."""
    return sum(offer.gpus for offer in state.hosts.offers.by_seq.values() if offer.lasts(state.now, least))


class AddsUp(SjfBsbf):
    """SJF-BSBF that keeps, for some times left, a count and the changes since then, and compares it with a new one."""

    name = "adds-up"

    def decide(self, view):
        found = view.hosts.offers
        known = getattr(self, "known", None)
        for least in LEAST:
            if known is None or known[0] < found.forgotten:
                break
            since = found.changes[known[0] - found.forgotten :]
            known[1][least] += sum(gpus for gpus, offer in since if offer.lasts(view.now, least))
            assert known[1][least] >= lasting(view, least)
            self.compared = getattr(self, "compared", 0) + 1
        else:
            known[0] = found.forgotten + len(found.changes)
            return super().decide(view)
        self.known = [found.forgotten + len(found.changes), {least: lasting(view, least) for least in LEAST}]
        return super().decide(view)


@pytest.mark.parametrize("most", [4, offers.MOST_CHANGES])
def test_a_count_and_the_changes_since_then_are_never_below_a_new_count(monkeypatch, most):
    monkeypatch.setattr(offers, "MOST_CHANGES", most)
    jobs = [job(f"j{n}", 1 + n * 7 % 4, 5.0 + n * 37 % 90, float(n * 5)) for n in range(300)]
    policy = AddsUp()
    Engine(jobs, nodes("2x4"), policy, belief=model(1.4)).run()
    assert policy.compared > 300


def test_hosts_that_run_slower_last_longer():
    kind, one = HostKind("plain", 8, 1, None, 0), Job("a", 0.0, "plain", 1, 8, 1)
    beside = Offer(kind, one, 2.0, 30.0, 1)  # 10 s of its own work are left at time 10
    assert beside.lasts(10.0, 10.0)
    assert not beside.lasts(10.0, 10.1)
    starting = Offer(kind, one, 0.0, 30.0, 1)
    assert starting.lasts(1e6, 30.0)
    assert not starting.lasts(0.0, 30.1)
