"""Runs of elements between ranks, without labels, for one all-to-all."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups.protocol import Group


class _Expected(NamedTuple):
    """A run of elements that another rank sends."""

    key: Hashable  # the receiver's name for it
    numel: int


class Mail:
    """Runs of elements between this rank and all others, for one all-to-all.

    Runs travel without labels. A rank sends its runs in the order in which the receiver expects
    them: both go through the leaves in the same order.
    """

    def __init__(self, group: Group):
        self._group = group
        # By rank, the runs (n,) to send and those to receive, in order
        self._outgoing: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._expected: defaultdict[int, list[_Expected]] = defaultdict(list)

    def send(self, receiver: int, run: Tensor) -> None:
        """Send a run (numel,); of an empty one nothing travels."""
        if run.numel():
            self._outgoing[receiver].append(run)

    def expect(self, sender: int, key: Hashable, numel: int) -> None:
        """Expect a run (numel,), the next one from this sender."""
        self._expected[sender].append(_Expected(key, numel))

    def exchange(self, like: Tensor) -> Mapping[Any, list[Tensor]]:
        """Run the all-to-all, in the dtype of `like`. Returns the runs (numel,) for each key,
        ordered by sender."""
        here, ranks = self._group.rank, range(self._group.size)
        # This rank's runs for itself skip the collective, and are not copied
        own = iter(self._outgoing.pop(here, []))
        num_sent = [sum(map(Tensor.numel, self._outgoing[rank])) for rank in ranks]
        sizes = [[run.numel for run in self._expected[rank]] for rank in ranks]
        num_received = [0 if rank == here else sum(sizes[rank]) for rank in ranks]
        # (sum of num_sent,), the runs in the order of their receivers: the one copy that sending
        # takes. `torch.cat` takes no empty list
        outgoing = itertools.chain(*(self._outgoing[rank] for rank in ranks))
        source = torch.cat([like.new_empty(0), *outgoing])
        # (sum of num_received,): runs are views of it
        target = like.new_empty(sum(num_received))
        self._group.all_to_all(target, num_received, source, num_sent).wait()

        # By key, runs in the order of senders
        arrived: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
        for sender, received in enumerate(target.split(num_received)):
            if sender == here:
                # `send` has left the empty ones out
                runs = [next(own) if numel else like.new_empty(0) for numel in sizes[here]]
            else:
                runs = list(received.split(sizes[sender]))
            for (key, _), run in zip(self._expected[sender], runs, strict=True):
                arrived[key].append(run)
        return arrived
