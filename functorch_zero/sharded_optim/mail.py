"""Runs of elements between ranks, without labels, for one all-to-all."""

from __future__ import annotations

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
        # This rank's runs for itself skip the collective, and are not copied
        own = iter(self._outgoing[self._group.rank])
        # Runs in the order of their receivers; `torch.cat` takes no empty list
        outgoing = [like.new_empty(0)]
        num_sent, num_received = [], []  # elements per rank
        for rank in range(self._group.size):
            is_other = rank != self._group.rank
            runs = self._outgoing[rank] if is_other else []
            outgoing += runs
            num_sent.append(sum(map(Tensor.numel, runs)))
            expected = self._expected[rank] if is_other else []
            num_received.append(sum(run.numel for run in expected))

        # (sum of num_sent,): the one copy that sending takes
        source = torch.cat(outgoing)
        # (sum of num_received,): runs are views of it
        target = like.new_empty(sum(num_received))
        self._group.all_to_all(target, num_received, source, num_sent).wait()

        # By key, runs in the order of senders
        arrived: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
        start = 0
        for sender in range(self._group.size):
            for key, numel in self._expected[sender]:
                if sender == self._group.rank and numel:
                    arrived[key].append(next(own))
                # An empty run, which `send` has left out
                elif sender == self._group.rank:
                    arrived[key].append(like.new_empty(0))
                else:
                    arrived[key].append(target[start : start + numel])
                    start += numel
        return arrived
