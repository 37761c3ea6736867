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
    """Up to three torch groups of a parent's ranks. They are None while this rank is alone or has
    left.

    Attributes:
        backends: device type -> backend, {"cpu": "gloo"}; the CPU has one always.
        of_device: those of this machine's accelerator. They are apart from the host's, which carry
            failures while a device hangs.
        host: between hosts.
        device: where `of_device` has one.
        reducing: for reduce-scatters alone, after `reduce_apart`.
        limit: seconds for each collective between hosts.
    """

    def __init__(self, parent: dist.ProcessGroup, timeout: timedelta) -> None:
        self._parent, self._timeout = parent, timeout
        self.limit = timeout.total_seconds()
        self.backends = own_backends(parent)
        self.of_device = of_device(self.backends)
        self.host: dist.ProcessGroup | None = None
        self.device: dist.ProcessGroup | None = None
        self.reducing: dist.ProcessGroup | None = None
        self._reduces_apart = False
        # To be cut off; weak, as they live with the code that waits for them
        self._works: set[weakref.ref[TorchWork]] = set()

    def connect(self, name: str | None = None) -> None:
        """Connect to the other ranks, which all call this. Raises RuntimeError where not all come.

        `name`: all have agreed upon it; None: torch's own.
        """
        of_host = {d: b for d, b in self.backends.items() if d not in self.of_device}
        self.host = self._made(of_host, name)
        if self.of_device:
            self.device = self._made(self.of_device, name and f"{name}/device")
        if self._reduces_apart:
            self._connect_reducing(name and f"{name}/reduce")

    def reduce_apart(self) -> None:
        """From now on, reduce-scatters over NCCL have a torch group of their own."""
        if self._reduces_apart or not accelerated(self.backends):
            return
        # After a failure it is `connect` that makes it
        if self.host is not None:
            self._connect_reducing(None)
        self._reduces_apart = True

    def _connect_reducing(self, name: str | None) -> None:
        self.reducing = self._made(accelerated(self.backends), name)

    def _made(self, backends: dict[str, str], name: str | None) -> dist.ProcessGroup:
        make: Callable[..., dist.ProcessGroup] = own_group
        if name is not None:
            make = partial(named_group, name=name)
        timeout = self._timeout
        # On a device torch can only end the process, so the watch's thread is to come first
        if backends.keys() & self.of_device.keys():
            timeout = 2 * timeout + timedelta(minutes=1)
        return make(self._parent, timeout=timeout, backends=backends)

    def group_for(self, method: str, *, on_device: bool) -> dist.ProcessGroup | None:
        """The torch group that runs this collective; None where this rank has left."""
        if self.host is None:
            return None
        if method == REDUCE_SCATTER and self.reducing is not None:
            return self.reducing
        return self.device if on_device else self.host

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
        holder = [self.host]  # `destroy` needs the last reference
        if self.reducing is not None and not self.of_device:
            holder.append(self.reducing)
            self.reducing = None
        self.host = None
        destroy(holder)

    def take_devices(self) -> list[dist.ProcessGroup]:
        """The last references to those of a device."""
        groups = [group for group in (self.device, self.reducing) if group is not None]
        self.device = self.reducing = None
        return groups
