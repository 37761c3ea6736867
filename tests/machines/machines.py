"""Several machines on this one: network namespaces, each with a hostname and one cable, a veth pair
to a bridge in a namespace of its own. Linux, as root, with iproute2. No packet leaves them."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CABLE = "eth0"  # on each machine
_NEW_NETWORK, _NEW_UTS = 0x40000000, 0x04000000  # of clone(2): a network, a hostname


class CannotMake(Exception):
    """Machines can't be made here."""


class Machines:
    """Machines m0, m1, ... at 10.77.0.1, 10.77.0.2, ..."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._prefix = f"fz{os.getpid()}"  # tests run side by side
        self._hub = f"{self._prefix}-hub"

    def up(self) -> None:
        """Make them, and put the cables in."""
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for machine in range(self._num):
            own, end = self._namespace(machine), f"cable{machine}"
            _ip("netns", "add", own)
            pair = ("type", "veth", "peer", "name", CABLE, "netns", own)
            _ip("-n", self._hub, "link", "add", end, *pair)
            _ip("-n", self._hub, "link", "set", end, "master", "bridge", "up")
            _ip("-n", own, "address", "add", f"{self.address(machine)}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _ip("-n", own, "link", "set", device, "up")

    def down(self) -> None:
        """Remove them. Their processes must have ended: a namespace lives on while one is in it."""
        for name in (*map(self._namespace, range(self._num)), self._hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def left(self) -> list[str]:
        """The namespaces of theirs that there are."""
        done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith(self._prefix)]

    def address(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def enter(self, machine: int) -> None:
        """Move this process, of one thread, to a machine."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._namespace(machine)}") as network:
            failed = libc.setns(network.fileno(), _NEW_NETWORK) or libc.unshare(_NEW_UTS)
        if failed:
            raise OSError(ctypes.get_errno(), "this process can't be moved")
        socket.sethostname(f"m{machine}")

    def cut(self, machine: int) -> None:
        """Pull out its cable."""
        _ip("-n", self._hub, "link", "set", f"cable{machine}", "down")

    def mend(self, machine: int) -> None:
        _ip("-n", self._hub, "link", "set", f"cable{machine}", "up")

    def _namespace(self, machine: int) -> str:
        return f"{self._prefix}-m{machine}"


@contextmanager
def made(num: int) -> Iterator[Machines]:
    """Machines, which are gone at the end.

    Raises:
        CannotMake: this process may not, or lacks the tools.
    """
    if sys.platform != "linux" or shutil.which("ip") is None:
        raise CannotMake("they need Linux and the tool `ip` (of iproute2)")
    machines = Machines(num)
    try:
        machines.up()
        yield machines
    finally:
        machines.down()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise CannotMake(f"ip {' '.join(words)}: {done.stderr.strip()}")
