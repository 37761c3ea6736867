"""A mesh of ranks with two axes, replicate and shard, and the axes of a step: pieces lie along one
axis, their copies along the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .debug import labelled
from .forwarding import Forwarding
from .process import ProcessGroup
from .protocol import Group, Work
from .single import SingleRank
from .torch_distributed import parent_group, part_of, rows_of_mesh
from .work import Then


@runtime_checkable
class Divisible(Protocol):
    """A group that can be divided."""

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """The group of these of its ranks, in increasing order, this one among them. Each of them
        calls it."""
        ...


class HybridGroup(Forwarding):
    """All ranks of a group, as a mesh of two axes (HSDP): rank r * shard + s is the s-th of replica
    r.

    Given to `shard`, pieces lie along the shard axis, and gradients are summed over the replicate
    axis besides. Itself it is the group of all its ranks. A torch DeviceMesh of two dims,
    (replicate, shard), is made into one.

    Args:
        group: that of all ranks; every one of them makes this.
        shard_size: the ranks along the shard axis, a divisor of the group's size.

    Attributes:
        shard: the group of this rank's replica.
        replicate: the group of the ranks that have the same place in other replicas.

    >>> from functorch_zero.groups import run_ranks
    >>> def axes(group):
    ...     mesh = HybridGroup(group, shard_size=2)
    ...     return mesh.replicate.rank, mesh.shard.rank
    >>> run_ranks(axes, 4)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """

    def __init__(self, group: Group, *, shard_size: int):
        if shard_size < 1 or group.size % shard_size:
            raise ValueError(
                f"shard_size must divide the number of ranks, {group.size}, so that all replicas "
                f"are alike; got {shard_size}"
            )
        super().__init__(group)
        first = group.rank - group.rank % shard_size
        self._divide(
            range(first, first + shard_size), range(group.rank % shard_size, group.size, shard_size)
        )

    @classmethod
    def of_rows(cls, group: Group, rows: Sequence[Sequence[int]]) -> HybridGroup:
        """The same of a mesh given as its rows, each the ranks of one replica."""
        made = cls.__new__(cls)
        Forwarding.__init__(made, group)
        row = next(row for row in rows if group.rank in row)
        place = row.index(group.rank)
        made._divide(sorted(row), sorted(other[place] for other in rows))
        return made

    def _divide(self, shard: Sequence[int], replicate: Sequence[int]) -> None:
        if not isinstance(self.inner, Divisible):
            raise TypeError(
                f"a {type(self.inner).__name__} can't be divided into axes. Remedy: give it a "
                "method `subgroup(ranks) -> Group`"
            )
        self.shard, self.replicate = (
            self.inner.subgroup(tuple(shard)),
            self.inner.subgroup(tuple(replicate)),
        )

    def by_piece(self) -> Group:
        """All ranks in the order of their pieces when each replica's pieces are cut over the
        replicas: one exchange."""
        number = self.shard.rank * self.replicate.size + self.replicate.rank
        return Reordered(self.inner, [int(n) for n in self.inner.exchange(str(number).encode())])


class Reordered(Forwarding):
    """A group whose ranks have other numbers.

    Args:
        numbers: of each rank of `inner`, its number here.
    """

    def __init__(self, inner: Group, numbers: Sequence[int]):
        super().__init__(inner)
        self._numbers = list(numbers)
        self._inner_of = sorted(range(inner.size), key=self._numbers.__getitem__)

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to size - 1."""
        return self._numbers[self.inner.rank]

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        gathered = torch.empty_like(out)
        work = self.inner.all_gather(gathered, piece)
        return Then(
            work,
            lambda: out.view(self.size, -1).copy_(gathered.view(self.size, -1)[self._inner_of]),
        )

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return self.inner.reduce_scatter(out, whole.view(self.size, -1)[self._numbers].view(-1))

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        sent, received = ([sizes[n] for n in self._numbers] for sizes in (in_sizes, out_sizes))
        runs = source.split(list(in_sizes))
        arrived = torch.empty_like(out)
        work = self.inner.all_to_all(
            arrived, received, torch.cat([runs[n] for n in self._numbers]), sent
        )

        def put() -> None:
            by_rank = arrived.split(received)
            torch.cat([by_rank[rank] for rank in self._inner_of], out=out)

        return Then(work, put)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self.inner.broadcast(tensor, self._inner_of[source])

    def exchange(self, payload: bytes) -> list[bytes]:
        payloads = self.inner.exchange(payload)
        return [payloads[rank] for rank in self._inner_of]


@dataclass(frozen=True)
class Axes:
    """The groups that a rank is in.

    Attributes:
        world: all ranks.
        shard: the ranks that hold the pieces of one copy of the params.
        replicate: the ranks that hold the same piece of different copies.
        optimizer: the ranks among which each element has one that updates it, in the order of their
            pieces.
    """

    world: Group
    shard: Group
    replicate: Group
    optimizer: Group

    @cached_property
    def groups(self) -> list[Group]:
        """The groups that are not the same, or of one rank."""
        distinct = {
            id(group): group for group in (self.world, self.shard, self.replicate, self.optimizer)
        }
        return [group for group in distinct.values() if group.size > 1]

    def at(self, label: str) -> Axes:
        """The same, for collectives that belong to `label`."""
        groups = (self.world, self.shard, self.replicate, self.optimizer)
        return Axes(*(labelled(group, label) for group in groups))

    @property
    def number(self) -> int:
        """Which of the pieces that the optimizer's ranks hold is this rank's."""
        return self.optimizer.rank

    @property
    def both(self) -> bool:
        """Whether gradients and optimizer state are cut over both axes, the replicate axis inside
        the shard axis."""
        return self.optimizer.size > self.shard.size


def axes_of(group: Group, *, both: bool = False) -> Axes:
    """Those of a group; `both` cuts the state over the replicate axis, too.

    Raises:
        ValueError: the group has one axis, and can't.
    """
    if isinstance(group, HybridGroup):
        return Axes(group, group.shard, group.replicate, group.by_piece() if both else group.shard)
    if both:
        raise ValueError(
            'state_axes="both" needs a group with a replicate and a shard axis, and this one '
            "has one axis, over "
            "which state is cut at levels 1 to 3. Remedy: HybridGroup(group, shard_size=...), or a "
            "DeviceMesh of two dims"
        )
    return Axes(group, group, SingleRank(), group)


def as_group(group: Group | dist.ProcessGroup | DeviceMesh | None) -> Group:
    """`group` itself if it is a `Group`, else a `ProcessGroup` over torch's group or mesh (None:
    all ranks).

    A mesh of two dims, (replicate, shard), becomes a `HybridGroup`.
    """
    if isinstance(group, Group):
        return group
    if group is not None and (rows := rows_of_mesh(group)) is not None:
        everyone = sorted(rank for row in rows for rank in row)
        parent = part_of(parent_group(None), everyone)
        return HybridGroup.of_rows(
            ProcessGroup(parent), [[everyone.index(rank) for rank in row] for row in rows]
        )
    return ProcessGroup(group)
