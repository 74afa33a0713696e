"""Which nodes are part of the cluster: which may join, are silent, are lost, and shall leave.

`ClusterExecutor` owns one and hands in what agents say; operators and the keeper of a ground change nodes through it. A
node is lost when its workers must be gone: a lease and a margin after its last answer. Where its ground vouches for it,
that is not enough, because its agent may have asked the ground: `may_run` says whether that can be so.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from carpool.live.clock import since_boot
from carpool.live.errors import WrongStatus
from carpool.live.executors.base import ExecutorListener
from carpool.live.executors.nodes import SILENT_S, ClusterNode, NodeBook, same_node
from carpool.live.executors.wire import HOLD_S, LONGEST_HOLD_S, NodeState, Phase
from carpool.live.grounds.base import HAND

EXCHANGES_PER_S = 200.0
"""Exchanges in a second that a service answers without being kept busy by them."""
LOOK_S = 0.25
"""Seconds between two looks for silent nodes."""
LONGEST_LOOK_S = 4 * LOOK_S
"""Seconds of silence that one look can add: a service that was stopped could not hear its nodes."""


class ClusterMembers:
    """The nodes of a cluster, and how they join and leave."""

    def __init__(self, book: NodeBook, lease_s: float, margin_s: float) -> None:
        self.book, self.lease_s, self.margin_s = book, lease_s, margin_s
        self.listener: ExecutorListener | None = None
        self.on_lost: Callable[[ClusterNode, str], None] = lambda node, why: None
        """Called when a node is lost, for the gangs there."""
        self.on_leaving: Callable[[ClusterNode, str], None] = lambda node, why: None
        """Called when a node is to leave, for the gangs there."""
        self.may_run: Callable[[ClusterNode], bool] = _has_ground
        """Whether workers may run on a node although its lease is over, because its ground may have vouched for it.
        Without a keeper, that is not known of the nodes of a ground."""
        self.end_of: Callable[[str], float | None] = lambda pilot: None
        """When a ground takes back the node of a pilot, in seconds since 1970; None: not known, or never."""
        self.save_s = 0.0
        """Seconds before its end at which jobs of a node must save and leave."""
        self._looked = since_boot()

    def _note(self, text: str, level: int = logging.WARNING) -> None:
        assert self.listener is not None, "recover() comes first"
        self.listener.note(text, level)

    def _changed(self) -> None:
        assert self.listener is not None, "recover() comes first"
        self.listener.nodes_changed()

    # ---- coming ----------------------------------------------------------------------------------------------------

    def lease_of(self, node: ClusterNode) -> float:
        """Return how long workers of a node may run after its last answer."""
        return max(self.lease_s, node.record.lease_s)

    def _settle_lease(self, node: ClusterNode, *, obeyed: bool) -> None:
        """Write down how long workers of a node may run, before it is granted. Where an earlier service granted more,
        that counts until it is over and the agent has `obeyed` this service."""
        held = node.record.lease_s
        over = obeyed and since_boot() >= node.met + held
        if held < self.lease_s or (held > self.lease_s and over):
            self.book.change(node, lease_s=self.lease_s)

    def admit(self, state: NodeState, term: int) -> ClusterNode | None:
        """Return the node that an agent speaks for, as part of the cluster; None: it is not yet. `term`: of this
        service."""
        node = self.book.nodes.get(state.node)
        if node is not None and node.present:
            if same_node(node, state):
                self._settle_lease(node, obeyed=state.term == term)
                return node
            if node.record.identity != state.identity and node.record.boot == state.boot:
                raise WrongStatus(
                    f"another agent speaks for node {state.node} (home {node.record.identity[:8]}); stop that one, "
                    f"and wait until its lease is over, or run `carpool nodes lost {state.node}`"
                )
            if node.record.boot == state.boot:
                if not _is_empty(state):  # its workers would run beside those of another node
                    return None
                self.lose(node, f"the GPUs of node {node.name} changed")
            elif node.record.identity == state.identity or node.silent_s > self.lease_of(node) + self.margin_s:
                self.lose(node, f"node {node.name} restarted")
            else:
                raise WrongStatus(f"node {state.node}: an agent on another machine has this name; stop one of the two")
        if state.leaving or not _is_empty(state):
            return None
        node = self.book.admit(state, self.lease_s)
        node.ends_at = self.end_of(state.pilot)
        self._note(f"node {node.name} joined with {len(node.gpus)} GPUs ({node.record.ground})", logging.INFO)
        node.heard = True
        self._changed()
        return node

    # ---- silence ---------------------------------------------------------------------------------------------------

    @property
    def hold_s(self) -> float:
        """Seconds for which an exchange without news is held: so many that all nodes together make `EXCHANGES_PER_S`,
        but few beside the lease, which only an answer renews. An agent with news does not wait for the answer."""
        wanted = max(HOLD_S, min(len(self.book.nodes) / EXCHANGES_PER_S, LONGEST_HOLD_S))
        return min(wanted, self.lease_s / 8)

    def look(self) -> None:
        """Close nodes that are silent, and lose those whose workers must be gone."""
        now = since_boot()
        passed, self._looked = min(LONGEST_LOOK_S, now - self._looked), now
        for node in self.book.present:
            node.unheard_s = node.unheard_s + passed if node.silent_s > passed else 0.0
            if node.silent_s > self.lease_of(node) + self.margin_s and not self.may_run(node):
                self.lose(node, f"node {node.name} was silent for {node.silent_s:.0f} s")
            elif node.silent_s > self.hold_s + SILENT_S and not node.silent and node.heard:
                node.silent = True
                self._changed()

    def lose(self, node: ClusterNode, why: str) -> None:
        """Give a node up. Its workers are gone: their lease is over, or their machine restarted, or they were ended."""
        self.book.change(node, lost=why, since=time.time())
        self._note(f"{why}; it is no part of the cluster now")
        self._changed()
        self.on_lost(node, why)
        node.changed.set()

    # ---- what operators and grounds ask for ------------------------------------------------------------------------

    def give_up(self, name: str) -> None:
        """Lose a node because the operator says that nothing runs there any more."""
        self.lose(self._known(name), f"node {name} was given up by the operator")

    def drain(self, name: str, drained: bool) -> None:
        """Close a node, so that nothing new starts there, or open it."""
        node = self._known(name)
        if node.record.drained is not drained:
            self.book.change(node, drained=drained)
            self._changed()

    def dismiss(self, name: str, why: str) -> None:
        """Let jobs on a node save and move, then let its agent end. Repeating it is harmless."""
        node = self._known(name)
        if not node.dismissed:
            node.dismissed = why
            self._note(f"node {name} leaves: {why}")
            self.on_leaving(node, why)
            self._changed()
            node.changed.set()

    def seconds_left(self, node: ClusterNode) -> float:
        """Return for how long jobs may run on a node before its ground takes it back."""
        return math.inf if node.ends_at is None else node.ends_at - self.save_s - time.time()

    def set_end(self, name: str, ends_at: float | None) -> None:
        """Note when a ground takes a node back, in seconds since 1970."""
        node = self.book.nodes.get(name)
        if node is not None:
            node.ends_at = ends_at

    def _known(self, name: str) -> ClusterNode:
        node = self.book.nodes.get(name)
        if node is None or not node.present:
            raise WrongStatus(f"node {ascii(name)[:40]} is no part of the cluster; `carpool nodes` lists them")
        return node

    def rows(self, jobs_on: Callable[[str], int]) -> list[dict[str, Any]]:
        """Return the nodes as operators see them."""
        return [self._row(self.book.nodes[name], jobs_on(name)) for name in sorted(self.book.nodes)]

    def _row(self, node: ClusterNode, jobs: int) -> dict[str, Any]:
        record = node.record
        state = "lost" if record.lost else "drained" if record.drained else "silent" if node.closed else "open"
        if state == "silent" and node.trouble == node.closed:
            state = "failing"
        if not record.lost and (node.leaving or node.dismissed):
            state = "leaving"
        lease = None if record.lost else max(0.0, self.lease_of(node) - node.silent_s)
        return {
            "node": node.name,
            "state": state,
            "why": record.lost or node.closed,
            "ground": record.ground,
            "pilot": record.pilot,
            "ends_at": None if record.lost else node.ends_at,
            "witness": node.witness,
            "address": record.address,
            "gpus": len(record.devices),
            "device": record.devices[0].device if record.devices else "",
            "mechanism": record.mechanism,
            "jobs": jobs,
            "lease_s": lease,
            "since": record.since,
            "shared_home": node.shared if node.heard else None,
            "as_root": node.as_root,
            "release": node.release,
        }


def _is_empty(state: NodeState) -> bool:
    """Return whether an agent knows that nothing runs on its node."""
    return state.parts is not None and all(part.phase is Phase.GONE for part in state.parts.values())


def _has_ground(node: ClusterNode) -> bool:
    return node.record.ground != HAND
