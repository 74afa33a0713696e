"""A relay between an agent and its service, which can stall: a network that is cut without anybody being told."""

import contextlib
import selectors
import socket
import threading


class Relay:
    """Passes connections on. `to_service` and `to_agent` say whether bytes of each direction pass; others wait."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.to_service = self.to_agent = True
        self.severed = False
        """No bytes pass, whatever else is said."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.2)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.options = ["--join", self.url]
        """Options of an agent that takes this road."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self, *, to_service: bool = False, to_agent: bool = False) -> None:
        """Stop passing bytes on, both ways unless told otherwise. Connections stay."""
        self.to_service, self.to_agent = to_service, to_agent

    def mend(self) -> None:
        self.to_service = self.to_agent = True

    def close(self) -> None:
        self._closed = True
        self._thread.join(5.0)
        self._listening.close()

    def lead_to(self, port: int) -> None:
        self._target = port

    def _run(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                agent, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(agent,), daemon=True).start()

    def _pass_on(self, agent: socket.socket) -> None:
        with agent:
            try:
                service = socket.create_connection(("127.0.0.1", self._target), 5.0)
            except OSError:
                return
            with service, selectors.DefaultSelector() as selector:
                selector.register(agent, selectors.EVENT_READ, (service, "to_service"))
                selector.register(service, selectors.EVENT_READ, (agent, "to_agent"))
                with contextlib.suppress(OSError):
                    self._forward(selector)

    def _forward(self, selector: selectors.BaseSelector) -> None:
        while not self._closed:
            for key, _ in selector.select(0.05):
                other, way = key.data
                if self.severed or not getattr(self, way):
                    threading.Event().wait(0.05)
                    continue
                data = key.fileobj.recv(65536)
                if not data:
                    return
                other.sendall(data)
