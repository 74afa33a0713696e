"""Server-sent events as Python reads them: messages of a response, one after the other.

`Client.events` uses it. It understands what the service sends: `id`, `event` and `data` of one line each, and comments.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message of a stream; an empty kind says only up to which number everything was seen."""

    number: int
    kind: str = ""
    data: Any = None


def messages(lines: Iterable[bytes]) -> Iterator[StreamMessage]:
    """Yield the messages that lines of a response contain. A message without its end is left out."""
    found: dict[str, str] = {}
    for line in lines:
        text = line.decode().rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            found[name] = value.removeprefix(" ")
            continue
        if found.get("id", "").isdigit():
            data = json.loads(found["data"]) if "data" in found else None
            yield StreamMessage(int(found["id"]), found.get("event", ""), data)
        found = {}
