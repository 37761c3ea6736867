"""The torch groups over which a rank's collectives go, from one connecting to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from .torch_distributed import (
    REDUCE_SCATTER,
    accelerated,
    destroy,
    named_group,
    of_device,
    own_backends,
    own_group,
)
from .work import TorchWork


class Connections:
    """Up to three torch groups of a parent's ranks; none while this rank is alone or has left.

    Attributes:
        backends: device type -> backend, {"cpu": "gloo"}; the CPU has one always.
        of_device: those of this machine's accelerator. They are apart from the host's, which carry
            failures while a device hangs.
        groups: "host": between hosts; "device": where `of_device` has one; "reduce": for
            reduce-scatters alone, after `reduce_apart`.
        limit: seconds for each collective between hosts.
    """

    def __init__(self, parent: dist.ProcessGroup, timeout: timedelta) -> None:
        self._parent, self._timeout = parent, timeout
        self.limit = timeout.total_seconds()
        self.backends = own_backends(parent)
        self.of_device = of_device(self.backends)
        of_host = {d: b for d, b in self.backends.items() if d not in self.of_device}
        # Of each group, in the order in which they connect
        self._backends_of = {"host": of_host}
        if self.of_device:
            self._backends_of["device"] = self.of_device
        self.groups: dict[str, dist.ProcessGroup] = {}
        # To be cut off; weak, as they live with the code that waits for them
        self._works: set[weakref.ref[TorchWork]] = set()

    @property
    def host(self) -> dist.ProcessGroup | None:
        """The group between hosts; None where this rank has left."""
        return self.groups.get("host")

    def connect(self, name: str | None = None) -> None:
        """Connect to the other ranks, which all call this. Raises RuntimeError where not all come.

        `name`: all have agreed upon it; None: torch's own.
        """
        for kind, backends in self._backends_of.items():
            self._connect(kind, backends, name)

    def reduce_apart(self) -> None:
        """From now on, reduce-scatters over NCCL have a torch group of their own."""
        backends = accelerated(self.backends)
        if not backends or "reduce" in self._backends_of:
            return
        # After a failure it is `connect` that makes it
        if self.host is not None:
            self._connect("reduce", backends, None)
        self._backends_of["reduce"] = backends

    def _connect(self, kind: str, backends: dict[str, str], name: str | None) -> None:
        make: Callable[..., dist.ProcessGroup] = own_group
        if name is not None:
            make = partial(named_group, name=f"{name}/{kind}")
        timeout = self._timeout
        # On a device torch can only end the process, so the watch's thread is to come first
        if backends.keys() & self.of_device.keys():
            timeout = 2 * timeout + timedelta(minutes=1)
        self.groups[kind] = make(self._parent, timeout=timeout, backends=backends)

    def group_for(self, method: str, *, on_device: bool) -> dist.ProcessGroup | None:
        """The torch group that runs this collective; None where this rank has left."""
        if self.host is None:
            return None
        apart = method == REDUCE_SCATTER and "reduce" in self.groups
        return self.groups.get("reduce" if apart else "device" if on_device else "host")

    def add(self, work: TorchWork) -> None:
        """A collective that is under way."""
        self._works.add(weakref.ref(work, self._works.discard))

    def close_host(self, era: int) -> None:
        """Close those between hosts, and let go of all works, for which this era has ended."""
        if self.host is None:
            return
        # The works' errors wait for the group's lock
        for reference in list(self._works):  # a copy: a work may be collected meanwhile
            work = reference()
            if work is not None:
                # A torch Work, even a finished one, keeps the connections open
                work.abandon(era)
        # Without a device, the one for reduce-scatters is between hosts, too
        kinds = ["host"] if self.of_device else [*self.groups]
        destroy([self.groups.pop(kind) for kind in kinds])  # the last references

    def take_devices(self) -> list[dist.ProcessGroup]:
        """After `close_host`: the last references to those of a device."""
        return [self.groups.pop(kind) for kind in [*self.groups]]
