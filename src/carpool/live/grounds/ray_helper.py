"""The process by which a service talks to Ray: `python -m carpool.live.grounds.ray_helper ADDRESS SERVICE`.

Ray ends a process that loses its cluster, so no service may be connected to Ray itself. This process reads one request
a line from standard input and writes one answer a line; it ends with its service. A pilot is wanted for as long as its
key is in Ray's store: pilots ask for it when the service is silent, so it is removed before a pilot counts as ended.
"""

import contextlib
import json
import logging
import os
import sys
from typing import Any

ACTOR = "pilot-"
"""How the names of the actors begin."""


def namespace_of(service: str) -> str:
    return f"carpool-{service}"


class RayHelper:
    """Carries out the requests of one service."""

    def __init__(self, address: str, service: str) -> None:
        import ray

        self._ray, self._service = ray, service
        ray.init(
            address=address,
            namespace=namespace_of(service),
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )

    def answer(self, request: dict[str, Any]) -> Any:
        if request["call"] == "submit":
            return self.submit(request["ticket"], request["any_node"])
        if request["call"] == "give_up":
            return self.give_up(request["pilot"])
        return self.pilots()

    # ---- the store -------------------------------------------------------------------------------------------------

    def _rows(self) -> dict[str, dict[str, Any]]:
        """Return what is written about the pilots that are wanted."""
        from ray.experimental import internal_kv

        space = namespace_of(self._service).encode()
        found = {}
        for key in internal_kv._internal_kv_list(b"", namespace=space):
            text = internal_kv._internal_kv_get(key, namespace=space)
            if text is not None:
                found[key.decode()] = json.loads(text)
        return found

    def _write(self, pilot: str, row: dict[str, Any] | None) -> None:
        from ray.experimental import internal_kv

        space, key = namespace_of(self._service).encode(), pilot.encode()
        if row is None:
            internal_kv._internal_kv_del(key, namespace=space)
        else:
            internal_kv._internal_kv_put(key, json.dumps(row).encode(), overwrite=True, namespace=space)

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, ticket: dict[str, Any], any_node: bool) -> str:
        """Start an actor on a node without one; return its node, or an empty text where no node is left."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from carpool.live.grounds.ray_pilot import RayPilot

        taken = {row["node_id"] for row in self._rows().values()}
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] not in taken]
        if not any_node:
            nodes = [node for node in nodes if node["Resources"].get("GPU")]
        if not nodes:
            return ""
        node = min(nodes, key=lambda one: ("node:__internal_head__" in one["Resources"], one["NodeName"]))
        name = str(node["NodeName"] or node["NodeManagerHostname"]).lower()
        row = {"node": name, "node_id": node["NodeID"], "state": "waiting"}
        self._write(ticket["pilot"], row)
        place = {"node": name, "address": node["NodeManagerAddress"]}
        self._ray.remote(RayPilot).options(
            name=f"{ACTOR}{ticket['pilot']}",
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            num_gpus=0 if any_node else node["Resources"]["GPU"],
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(ticket, place, namespace_of(self._service))
        return name

    def pilots(self) -> list[dict[str, Any]]:
        """Return the pilots that are wanted and alive. A pilot that is only one of these is made neither."""
        named = {name for name in self._ray.util.list_named_actors() if name.startswith(ACTOR)}
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        rows = self._rows()
        found = []
        for pilot, row in rows.items():
            if f"{ACTOR}{pilot}" in named and row["node_id"] in alive:
                found.append({"id": pilot, **row})
            else:
                self.give_up(pilot)
        for name in named:
            if name.removeprefix(ACTOR) not in rows:
                self._kill(name)
        return found

    def give_up(self, pilot: str) -> None:
        self._write(pilot, None)
        self._kill(f"{ACTOR}{pilot}")

    def _kill(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # there is none
            self._ray.kill(self._ray.get_actor(name), no_restart=True)


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever Ray prints
    try:
        helper = RayHelper(sys.argv[1], sys.argv[2])
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return 1
    answers.write(json.dumps({"answer": "ready"}) + "\n")
    for line in sys.stdin:
        try:
            row = {"answer": helper.answer(json.loads(line))}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # Ray would wait for its cluster
