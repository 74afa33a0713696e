"""Carpool with one safety rule switched off, to show that chaos finds what the rule prevents.

`python tests/cluster/mutated.py RULE WORDS...` runs `carpool WORDS...` without the rule:

- `lease`: the workers of a node that hears nothing run on;
- `silence`: a node that is silent is given up at once, and not only when its lease must be over; on a ground, also
  without waiting for that;
- `deposed`: a service that another one has replaced does not notice it, and goes on answering agents;
- `term`: the same, and agents obey it although they have obeyed a later one;
- `none`: everything holds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

AGENT = "carpool.live.agent.main"
"""Stands for an agent, by the word with which tests find agents among all processes."""


def switch_off(rule: str) -> None:
    from carpool.live.agent import lease, supervisor
    from carpool.live.executors import members
    from carpool.live.service import ground_keeper

    supervisor.AGENT = [sys.executable, str(Path(__file__).resolve()), rule, AGENT]
    if rule == "lease":
        honest = lease.NodeLease.extend
        lease.NodeLease.extend = lambda self, sent_at, lease_s: honest(self, sent_at, 1e6)
    elif rule == "silence":
        look = members.ClusterMembers.look

        def hasty(self):
            self.lease_of = lambda node: 0.0
            try:
                look(self)
            finally:
                del self.lease_of

        members.ClusterMembers.look = hasty
        ground_keeper.GroundKeeper.may_run = lambda self, node: False
    elif rule in ("deposed", "term"):
        forget_being_deposed()
        if rule == "term":
            obey_any_term()
    elif rule != "none":
        sys.exit(f"there is no rule {rule}")


def forget_being_deposed() -> None:
    import asyncio

    from carpool.live.errors import Deposed
    from carpool.live.journal.leadership import LeaderLease
    from carpool.live.service.driver import Driver

    class Never(asyncio.Event):
        def set(self) -> None:
            pass

    honest_init, honest_run = LeaderLease.__init__, Driver.run

    def init(self, *arguments, **named):
        honest_init(self, *arguments, **named)
        self.lost = Never()

    async def run(self):
        try:
            await honest_run(self)
        except Deposed:
            await asyncio.Event().wait()

    LeaderLease.__init__, Driver.run = init, run
    LeaderLease.leads = lambda self: bool(self.term)


def obey_any_term() -> None:
    from itertools import count

    from carpool.live.agent.road import Road

    honest, numbers = Road.sync, count(1)

    def sync(self, state):
        return {**honest(self, {**state, "term": 0}), "term": 0, "number": next(numbers)}

    Road.sync = sync


def main() -> None:
    rule, *words = sys.argv[1:]
    switch_off(rule)
    if words == [AGENT]:
        from carpool.live.agent.main import main as run

        sys.exit(run())
    sys.argv[1:] = words
    from carpool.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
