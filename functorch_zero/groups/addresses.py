"""Addresses of this host, and its ways to others."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import NamedTuple

_ANY_PORT = 1  # a way is the same for all ports


class Way(NamedTuple):
    """The way from this host to one of some name or address."""

    own: str  # this host's address on it
    is_here: bool  # whether that is this host, under whatever name or address


def way_to(host: str | None) -> Way | None:
    """The way to a host; None: there is none. Nothing is sent."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of UDP: it only tells from which address one would send
            own, other = str(probe.getsockname()[0]), str(probe.getpeername()[0])
        # Some systems give their own name a second loopback address, 127.0.1.1
        return Way(own, is_here=own == other or is_loopback(other))
    return None


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_of(host: str) -> str | None:
    """As gloo finds it: the first address of that name that a socket of this host can have."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return None
