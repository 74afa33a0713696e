"""This machine's address towards the service, and the network interface that has an address, for NCCL and gloo."""

import fcntl
import socket
import struct
from functools import cache
from urllib.parse import urlsplit

from carpool.errors import InputError

_SIOCGIFADDR = 0x8915


@cache
def interface_variables(address: str) -> dict[str, str]:
    """Return the variables that make NCCL and gloo use the interface with an address; none if no interface has it."""
    name = _interface_of(address)
    return {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name} if name else {}


def _interface_of(address: str) -> str:
    try:
        wanted = socket.gethostbyname(address)
    except OSError:
        return ""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:  # an interface without an address
                continue
            own = socket.inet_ntoa(found)
            if own == wanted or (wanted.startswith("127.") and own.startswith("127.")):
                return name
    return ""


def own_address(url: str) -> str:
    """Return the address that this machine has towards the service."""
    parts = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname or "", parts.port or 80))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        raise InputError(f"--join {ascii(url)[:100]}: cannot be reached from here; give --address as well") from None
