"""A relay between the pilots of a ground and their service, which can be cut for one pilot: all use one address."""

import contextlib
import re
import selectors
import socket
import threading

PILOT = re.compile(rb"pilot\.([0-9a-f]+)\.")


class PilotRelay:
    """Passes connections on. `cut` names the pilots whose bytes wait, and which way."""

    def __init__(self, port: int = 0) -> None:
        self.target = port
        self.cuts: dict[str, tuple[bool, bool]] = {}
        """Whether bytes to the service and to the agent wait, by pilot."""
        self.only: frozenset[str] | None = None
        """The pilots that are heard; None: all. It holds for pilots that do not exist so far, too."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.2)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self, pilot: str, *, to_service: bool = True, to_agent: bool = True) -> None:
        self.cuts[pilot] = to_service, to_agent

    def restore(self, pilot: str) -> None:
        self.cuts.pop(pilot, None)

    def _waits(self, pilot: str, way: int) -> bool:
        if self.only is not None and pilot not in self.only:
            return True
        return self.cuts.get(pilot, (False, False))[way]

    def close(self) -> None:
        self._closed = True
        self._thread.join(5.0)
        self._listening.close()

    def _run(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                agent, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(agent,), daemon=True).start()

    def _pass_on(self, agent: socket.socket) -> None:
        with agent, contextlib.suppress(OSError):
            agent.settimeout(10.0)
            first = agent.recv(65536)
            found = PILOT.search(first)
            pilot = found[1].decode() if found else ""
            while self._waits(pilot, 0) and not self._closed:
                threading.Event().wait(0.05)
            with socket.create_connection(("127.0.0.1", self.target), 5.0) as service:
                service.sendall(first)
                with selectors.DefaultSelector() as selector:
                    selector.register(agent, selectors.EVENT_READ, (service, 0))
                    selector.register(service, selectors.EVENT_READ, (agent, 1))
                    self._forward(selector, pilot)

    def _forward(self, selector: selectors.BaseSelector, pilot: str) -> None:
        while not self._closed:
            for key, _ in selector.select(0.05):
                other, way = key.data
                if self._waits(pilot, way):
                    threading.Event().wait(0.05)
                    continue
                data = key.fileobj.recv(65536)
                if not data:
                    return
                other.sendall(data)
