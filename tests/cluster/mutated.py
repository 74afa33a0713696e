"""Carpool with one safety rule switched off, to show that chaos finds what the rule prevents.

`python tests/cluster/mutated.py RULE WORDS...` runs `carpool WORDS...` without the rule:

- `lease`: the workers of a node that hears nothing run on;
- `silence`: a node that is silent is given up at once, and not only when its lease must be over;
- `none`: everything holds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def switch_off(rule: str) -> None:
    from carpool.live.agent import lease, supervisor
    from carpool.live.executors import cluster

    supervisor.AGENT = [sys.executable, str(Path(__file__).resolve()), rule, "--agent"]
    if rule == "lease":
        honest = lease.NodeLease.extend
        lease.NodeLease.extend = lambda self, sent_at, lease_s: honest(self, sent_at, 1e6)
    elif rule == "silence":
        look = cluster.ClusterExecutor._look

        def hasty(self):
            self.lease_s, kept = 0.0, self.lease_s
            try:
                look(self)
            finally:
                self.lease_s = kept

        cluster.ClusterExecutor._look = hasty
    elif rule != "none":
        sys.exit(f"there is no rule {rule}")


def main() -> None:
    rule, *words = sys.argv[1:]
    switch_off(rule)
    if words == ["--agent"]:
        from carpool.live.agent.main import main as run

        sys.exit(run())
    sys.argv[1:] = words
    from carpool.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
