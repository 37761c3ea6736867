"""`fully_shard`'s collectives over a simulated wire.

Their base classes have no public names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from tests.benchmarks.simulated import Wire


class _OverWire:
    """A collective on the stream that `fully_shard` calls it on. `wire` carries one at a time, as
    its one communicator would."""

    def __init__(self, wire: Wire, ranks: int) -> None:
        self.wire, self.ranks = wire, ranks

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def carry(self, whole: Tensor, move: Callable[[], object]) -> None:
        num_bytes = whole.nbytes * (self.ranks - 1) / self.ranks
        if whole.is_cuda:
            with self.wire.carrying(num_bytes, whole.device):
                move()
        else:
            self.wire.start(num_bytes, move).wait()


class Gather(_OverWire, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        def move() -> None:
            for row in output_tensor.view(self.ranks, -1):
                if row.data_ptr() != input_tensor.data_ptr():  # the rank's own part of the output
                    row.copy_(input_tensor.view(-1))

        self.carry(output_tensor, move)


class Scatter(_OverWire, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        own = input_tensor.view(self.ranks, -1)[0]
        # The mean of equal terms
        self.carry(input_tensor, lambda: output_tensor.view(-1).copy_(own))
