"""A mesh of ranks with two axes, replicate and shard, and the axes of a step: pieces lie along one
axis, their copies along the other.

Note [same data]: the ranks along an axis hold different parts of the batch, or all the same one.
Means, random numbers and buffers are made over the ranks whose data differ. Ranks with the same
data compute the same gradients, so along their axis nothing is summed: each takes its own slice.
Agreement on steps, and failures, concern all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import check_choice
from .forwarding import Forwarding, reduce_apart, subgroup
from .labels import labelled
from .process import ProcessGroup
from .protocol import Done, Group, Work
from .single import SingleRank
from .torch_distributed import parent_group, part_of
from .work import Then

SameData = Literal["replicate", "shard"]


class HybridGroup(Forwarding):
    """All ranks of a group, as a mesh of two axes (HSDP): rank r * shard + s is the s-th of replica
    r.

    Given to `shard`, pieces lie along the shard axis, and gradients are summed over the replicate
    axis besides. Itself it is the group of all its ranks. A torch DeviceMesh of two dims,
    (replicate, shard), is made into one.

    Args:
        group: that of all ranks; every one of them makes this.
        shard_size: the ranks along the shard axis, a divisor of the group's size.
        same_data: the axis along which all ranks are given the same part of the batch; None: each
            rank of the mesh has a part of its own. Steps raise MismatchError where such ranks find
            different losses or metrics.

    Attributes:
        shard: the group of this rank's replica.
        replicate: the group of the ranks that have the same place in other replicas.
        data: the ranks that hold the parts of the batch; this one takes part `data.rank` of
            `data.size`. It is this mesh itself where every rank has a part of its own.

    >>> from functorch_zero.groups import run_ranks
    >>> def axes(group):
    ...     mesh = HybridGroup(group, shard_size=2)
    ...     return mesh.replicate.rank, mesh.shard.rank
    >>> run_ranks(axes, 4)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> def part(group):
    ...     mesh = HybridGroup(group, shard_size=2, same_data="replicate")
    ...     return mesh.data.rank, mesh.data.size
    >>> run_ranks(part, 4)
    [(0, 2), (1, 2), (0, 2), (1, 2)]
    """

    # A class attribute too, since `of_rows` makes a mesh without `__init__`
    same_data: SameData | None = None

    def __init__(self, group: Group, *, shard_size: int, same_data: SameData | None = None):
        # The arguments are checked before any communication, so that all ranks raise
        check_same_data(same_data)
        self.same_data = same_data
        check_shard_size(shard_size, group.size)
        super().__init__(group)
        # Neighbours: launchers number the ranks of one machine in a row
        starts = range(0, group.size, shard_size)
        self._divide([range(first, first + shard_size) for first in starts])

    @classmethod
    def of_rows(cls, group: Group, rows: Sequence[Sequence[int]]) -> HybridGroup:
        """The group of a mesh that is given as its rows, each the ranks of one replica."""
        made = cls.__new__(cls)
        Forwarding.__init__(made, group)
        made._divide(rows)
        return made

    def _divide(self, rows: Sequence[Sequence[int]]) -> None:
        """Make the groups of the two axes. Every rank makes both, in this order."""
        row = next(row for row in rows if self.rank in row)  # this rank's replica
        column = [other[row.index(self.rank)] for other in rows]
        # In increasing order, whatever that of the rows is
        self.shard = subgroup(self.inner, sorted(row))
        self.replicate = subgroup(self.inner, sorted(column))

    @property
    def data(self) -> Group:
        """The ranks that hold the parts of the batch."""
        return axes_of(self).data

    def by_piece(self) -> Group:
        """All ranks in the order of their pieces when each replica's pieces are cut over the
        replicas: one exchange."""
        # Piece number = shard * replicas + replica: a replica's piece is cut once more
        own = self.shard.rank * self.replicate.size + self.replicate.rank
        numbers = self.inner.exchange(str(own).encode())
        return Reordered(self.inner, [int(number) for number in numbers])


class Reordered(Forwarding):
    """A group whose ranks have other numbers.

    Args:
        numbers: of each rank of `inner`, its number here.
    """

    def __init__(self, inner: Group, numbers: Sequence[int]):
        super().__init__(inner)
        self._numbers = list(numbers)  # `inner` rank -> number here
        # The other way round: of each number here, the rank of `inner`
        self._inner_of = sorted(range(inner.size), key=self._numbers.__getitem__)

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to size - 1."""
        return self._numbers[self.inner.rank]

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        gathered = torch.empty_like(out)  # (N * k,), in the inner group's order
        work = self.inner.all_gather(gathered, piece)

        def put() -> None:  # row n becomes that of the rank whose number here is n
            rows = gathered.view(self.size, -1)
            out.view(self.size, -1).copy_(rows[self._inner_of])

        return Then(work, put)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        # Indexing copies, so `whole` stays as it is, though it need not
        slices = whole.view(self.size, -1)[self._numbers]  # (N, k), in the inner group's order
        return self.inner.reduce_scatter(out, slices.view(-1))

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        # By the inner group's ranks
        sent = [in_sizes[number] for number in self._numbers]
        received = [out_sizes[number] for number in self._numbers]
        runs = source.split(list(in_sizes))  # by number here
        reordered = torch.cat([runs[number] for number in self._numbers])  # (sum of in_sizes,)
        arrived = torch.empty_like(out)  # (sum of out_sizes,), in the inner group's order
        work = self.inner.all_to_all(arrived, received, reordered, sent)

        def put() -> None:
            by_rank = arrived.split(received)
            torch.cat([by_rank[rank] for rank in self._inner_of], out=out)

        return Then(work, put)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self.inner.broadcast(tensor, self._inner_of[source])  # `source` is a number here

    def exchange(self, payload: bytes) -> list[bytes]:
        payloads = self.inner.exchange(payload)
        return [payloads[rank] for rank in self._inner_of]


@dataclass(frozen=True)
class Axis:
    """One direction of a mesh: this rank's ranks along it, and whether their data differ; see Note
    [same data]."""

    name: str
    group: Group
    holds_different_data: bool = True

    @property
    def size(self) -> int:
        """The number of ranks along it."""
        return self.group.size

    @property
    def rank(self) -> int:
        """This rank's number along it."""
        return self.group.rank

    def at(self, label: str) -> Axis:
        """This axis, for collectives that belong to `label`."""
        return replace(self, group=labelled(self.group, label))

    def sum(self, flat: Tensor) -> Work:
        """`flat` (k,) becomes the sum over the axis's data, in place."""
        # The same data give the same sum on every rank, so it is there already
        return self.group.all_reduce(flat) if self.holds_different_data else Done()

    def sum_to_pieces(self, out: Tensor, whole: Tensor) -> Work:
        """`out` (k,) becomes this rank's slice of the sum of `whole` (N * k,) over the axis's data.
        `whole` may be overwritten."""
        if self.holds_different_data:
            return self.group.reduce_scatter(out, whole)
        # (N * k,) -> row `rank` (k,): the reduce-scatter's result, without a message
        out.copy_(whole.view(self.size, -1)[self.rank])
        return Done()


class Copy(NamedTuple):
    """This rank among those that hold the same data as it does, each of which is a copy."""

    data: int = 0  # the number of the data: the part of the batch
    number: int = 0  # of this copy
    num: int = 1  # of all copies of these data


ONLY_COPY = Copy()


@dataclass(frozen=True)
class Axes:
    """The groups that a rank is in.

    Attributes:
        world: all ranks. They agree on steps and collectives, and hear of failures.
        shard: the ranks that hold the pieces of one copy of the params.
        replicate: the ranks that hold the same piece of different copies.
        optimizer: the ranks among which each element has one that updates it, in the order of their
            pieces.
    """

    world: Group
    shard: Axis
    replicate: Axis
    optimizer: Group

    @cached_property
    def data(self) -> Group:
        """The ranks whose data differ: for means, random numbers and buffers. It is the world where
        all do."""
        if self.same_data is None or self.same_data.size == 1:
            return self.world
        return (self.shard if self.same_data is self.replicate else self.replicate).group

    @property
    def same_data(self) -> Axis | None:
        """The axis along which all ranks have the same part of the batch, if there is one."""
        axes = self.shard, self.replicate
        return next((axis for axis in axes if not axis.holds_different_data), None)

    @property
    def mesh(self) -> str:
        """The mesh in words; "" where there is one axis, and all its ranks' data differ."""
        if self.replicate.size == 1 and self.same_data is None:
            return ""
        sizes = f"replicate {self.replicate.size} x shard {self.shard.size}"
        return f"{sizes}; same data along {self.same_data.name}" if self.same_data else sizes

    @cached_property
    def copy(self) -> Copy:
        """This rank among those of the same data."""
        if self.same_data is None:  # each rank has data of its own
            return Copy(self.world.rank)
        return Copy(self.data.rank, self.same_data.rank, self.same_data.size)

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of more than one rank, each once."""
        # In a group of one axis three of them are one object
        groups = self.world, self.shard.group, self.replicate.group, self.optimizer
        distinct = {id(group): group for group in groups}
        return [group for group in distinct.values() if group.size > 1]

    def at(self, label: str) -> Axes:
        """These axes, for collectives that belong to `label`."""
        return replace(
            self,
            world=labelled(self.world, label),
            shard=self.shard.at(label),
            replicate=self.replicate.at(label),
            optimizer=labelled(self.optimizer, label),
        )

    @property
    def piece_number(self) -> int:
        """Which of the pieces that the optimizer's ranks hold is this rank's."""
        return self.optimizer.rank

    @property
    def both(self) -> bool:
        """Whether gradients and optimizer state are cut over both axes, the replicate axis inside
        the shard axis."""
        return self.optimizer.size > self.shard.size


def axes_of(group: Group, *, both: bool = False) -> Axes:
    """The axes of a group; `both` cuts the state over the replicate axis too, which takes one
    exchange.

    Raises:
        ValueError: the group has one axis, and can't.
    """
    if isinstance(group, HybridGroup):
        # Pieces of params and of gradients travel along the shard axis at the same time
        reduce_apart(group.shard)
        same = group.same_data
        return Axes(
            group,
            Axis("shard", group.shard, holds_different_data=same != "shard"),
            Axis("replicate", group.replicate, holds_different_data=same != "replicate"),
            # A collective, so every rank passes the same `both`
            group.by_piece() if both else group.shard,
        )
    if both:
        raise ValueError(
            'state_axes="both" needs a group with a replicate and a shard axis, and this one '
            "has one axis, over which state is cut at levels 1 to 3. Remedy: "
            "HybridGroup(group, shard_size=...), or a DeviceMesh of two dims"
        )
    reduce_apart(group)
    # The one axis is the shard axis, and beside it stands a replicate axis of one rank
    return Axes(group, Axis("shard", group), Axis("replicate", SingleRank()), group)


def check_shard_size(shard_size: int, num_ranks: int) -> None:
    """Raise ValueError unless so many ranks make replicas of this size."""
    if shard_size < 1 or num_ranks % shard_size:
        raise ValueError(
            f"shard_size must divide the number of ranks, {num_ranks}, so that all replicas are "
            f"alike; got {shard_size}"
        )


def check_same_data(value: SameData | None) -> None:
    """Raise ValueError unless this is an axis of the mesh, or None."""
    check_choice("same_data", value, (None, *get_args(SameData)))


def as_group(group: Group | dist.ProcessGroup | DeviceMesh | None) -> Group:
    """`group` itself if it is a `Group`, else a `ProcessGroup` over torch's group or mesh (None:
    all ranks).

    A mesh of two dims, (replicate, shard), becomes a `HybridGroup`.
    """
    if isinstance(group, Group):
        return group
    if not isinstance(group, DeviceMesh) or group.ndim != 2:
        return ProcessGroup(group)  # a torch group, a mesh of one dim, or None
    rows: list[list[int]] = group.mesh.tolist()  # (replicas, ranks of each)
    # `everyone` is part of the world at most, and every rank of the mesh makes it
    everyone = sorted(rank for row in rows for rank in row)
    parent = part_of(parent_group(None), everyone)
    # The mesh's ranks may be some of the world's: here they are numbered from 0
    numbered = [[everyone.index(rank) for rank in row] for row in rows]
    return HybridGroup.of_rows(ProcessGroup(parent), numbered)
