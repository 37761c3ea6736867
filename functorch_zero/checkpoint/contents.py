"""The elements of a state's leaves on this rank, and those of them that this rank is to save.

A leaf is known by its path in the state, `params.embed.weight` or `opt_state.0.mu.embed.weight`,
and its elements by their place in the flattened whole leaf. These are the same at every level and
world size and for every choice of units, so files speak of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ..errors import StructureError
from ..groups.mesh import Axes
from ..groups.protocol import Group
from ..groups.single import SingleRank
from ..layout.extent import Extent
from ..layout.node import LeafPart
from ..layout.sharded_tree import ShardedTree
from ..optim.base import Transform
from ..params import Names, Params, as_local, is_on_engine
from ..sharded.parts import KeptFlat
from ..sharded.program.step import ShardedStep
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.program_step import ProgramStep
from ..step.state import State
from ..step.train import TrainStep
from ..tree import check_savable, dotted, is_within, paths

Step = ProgramStep | ShardedStep
Value = bool | int | float | str


class LocalLeaf(NamedTuple):
    """This rank's elements of one leaf."""

    path: str
    tensor: Tensor  # elements [start, stop) of the leaf, in any shape
    shape: tuple[int, ...]  # of the whole leaf
    start: int  # in elements of the flattened whole leaf
    stop: int
    everywhere: bool  # every rank has all of it
    # By this rank, unless everywhere: one of the ranks that have the same elements saves them
    saved: bool = True
    # The leaf is a row per rank, of which the sum counts, and this rank has one row
    summed: bool = False

    @property
    def numel(self) -> int:
        """Of the whole leaf."""
        return prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether the whole leaf is here, in its own shape."""
        return tuple(self.tensor.shape) == self.shape


class Run(NamedTuple):
    """Elements of a leaf in a row, to be saved by this rank."""

    leaf: int  # its position among the leaves
    start: int  # in the whole leaf
    numel: int
    tensor: Tensor  # holds these elements
    first: int  # the position of the first one in it

    def flat(self) -> Tensor:
        """The elements, row by row (numel,): a view where they lie so, else a copy."""
        flat = self.tensor.detach().reshape(-1)[self.first : self.first + self.numel]
        # Of one dim, a view may have any stride
        return flat.resolve_conj().resolve_neg().contiguous()

    @property
    def nbytes(self) -> int:
        return self.numel * self.tensor.element_size()


class Contents(NamedTuple):
    """A state, leaf by leaf."""

    leaves: list[LocalLeaf]  # the leaves that are tensors, in flatten order
    values: dict[str, Value]  # the others, by path; the same on every rank


def group_of(step: Step) -> Group:
    """The ranks that a step works with."""
    return step.group if isinstance(step, ShardedStep) else SingleRank()


def donates(step: Step) -> bool:
    """Whether a step may write over the state that it is given."""
    return isinstance(step, ShardedStep) and step.options.donate


def optimizer_of(step: Step) -> Transform | None:
    """A training step's optimizer; None: the step is a program, of which nobody knows more."""
    unsharded = step.unsharded if isinstance(step, ShardedStep) else step
    return unsharded.optimizer if isinstance(unsharded, TrainStep) else None


def contents_of(step: Step, state: State) -> Contents:
    """This rank's part of a state.

    Raises:
        StructureError: the state is not of this step, or has leaves that can't be saved.
        DonatedError: its storage was given away.
    """
    check_state(step, state)
    found: list[LocalLeaf] = []
    values: dict[str, Value] = {}
    # Leaves that are no tensors, such as an optimizer's plain numbers, go to `values`
    local = as_local(state)
    check_savable(local, "the state")
    leaves = optree.tree_leaves(local)
    for path, leaf, spot in zip(_paths(local), leaves, _spots(step, state), strict=True):
        if isinstance(leaf, Tensor):
            found.append(_local_leaf(path, leaf, spot))
        else:
            values[path] = leaf
    return Contents(found, values)


def check_step(step: Any) -> None:
    """Raise unless it is a step whose states can be saved."""
    if not isinstance(step, Step):
        raise TypeError(
            "step must be one that train_step, program_step or shard made, got "
            f"{type(step).__name__}"
        )


def check_state(step: Step, state: Any) -> None:
    """Raise unless `state` is one that `step` takes."""
    check_step(step)
    if not isinstance(state, State):
        raise StructureError(
            f"a checkpoint holds a State, as step.init makes it; got {type(state).__name__}"
        )
    if isinstance(step, ShardedStep):
        step.check_state(state)
        _check_same_buffers(step, state)
    elif state.sharding is not None:
        raise StructureError(
            "the state is sharded and the step isn't. Remedy: pass the step that `shard` returned"
        )


def _check_same_buffers(step: ShardedStep, state: State) -> None:
    """Raise if each rank may keep buffers of its own."""
    if step.options.sync_buffers != "local" or step.group.size == 1:
        return
    if any(is_within(path, step.unsharded.buffers) for path in paths(as_local(state.value))):
        raise StructureError(
            'buffers differ by rank under sync_buffers="local", and a checkpoint has one of each. '
            'Remedy: give save a step made with shard(..., sync_buffers="rank0"), which takes rank '
            "0's, or keep yours elsewhere"
        )


def names_in(state: State) -> dict[str, Names]:
    """By its path in the state, the names of the model that a tree is of."""
    nodes = optree.tree_leaves(state, is_leaf=_is_params)
    rows = zip(paths(state, _is_params), nodes, strict=True)
    return {path: node.names for path, node in rows if _is_params(node)}


def frozen_in(step: Step, state: State) -> frozenset[str]:
    """The paths of a state's frozen params.

    Raises:
        StructureError: the state is a program's, in which no leaf is known to stay as it is.
    """
    if optimizer_of(step) is None:
        raise StructureError(
            "frozen=False is for training steps: a program may change leaves that no gradient "
            "trains, such as a teacher's average. Remedy: leave it out"
        )
    if state.sharding is not None:
        specs = state.sharding.layout.leaves
        names = [spec.path for spec in specs if not spec.trainable]
    else:
        rows = zip(paths(state.params), state.trained.flags(state.params), strict=True)
        names = [path for path, on in rows if not on]
    return frozenset(dotted("params", name) for name in names)


def _is_params(node: Any) -> bool:
    return isinstance(node, Params)


def _paths(state: State) -> list[str]:
    """The path of every leaf, in flatten order; raises unless they differ."""
    found = paths(state)
    for path, n in Counter(found).items():
        if n > 1:
            raise StructureError("two leaves of the state have the same path", path=path)
    return found


class _Spot(NamedTuple):
    """A rank's part of a leaf."""

    extent: Extent | None = None  # None: the whole leaf, in the shape that it has here
    everywhere: bool = True  # these as of `LocalLeaf`, and in its order
    saved: bool = True
    summed: bool = False


_EVERYWHERE = _Spot()


def _local_leaf(path: str, leaf: Tensor, spot: _Spot) -> LocalLeaf:
    if leaf.device.type == "meta":
        raise StructureError("a leaf on the meta device has no values", path=path)
    extent = spot.extent or Extent.of(leaf)
    # Caught here, since it would otherwise save wrong elements under right names
    if leaf.numel() != extent.num_here:
        raise StructureError(
            "a leaf is not cut as its layout says",
            path=path,
            expected=f"{extent.num_here} elements",
            got=leaf.numel(),
        )
    return LocalLeaf(path, leaf, extent.shape, extent.in_leaf.start, extent.in_leaf.stop, *spot[1:])


def _spots(step: Step, state: State) -> list[_Spot]:
    """The spot of every leaf, in flatten order. Buffers, counters and seeds are the same on every
    rank."""
    # On one rank every leaf is everywhere
    if not isinstance(step, ShardedStep):
        return [_EVERYWHERE] * len(optree.tree_leaves(state))
    axes, nodes = step.options.axes, optree.tree_leaves(state.replace(parts=None), is_on_engine)
    # The parts are a state's last leaves
    return [x for node in nodes for x in _node_spots(node, axes)] + _parts_spots(step, state)


def _node_spots(node: Any, axes: Axes) -> list[_Spot]:
    """The spots of a node of a program's value, which knows how it is cut; or of a leaf."""
    in_pieces = True  # else as params are held between steps
    parts: Sequence[LeafPart | None]  # None: every rank has the same
    if isinstance(node, ShardedOptState):
        parts = node.holding.parts
    elif isinstance(node, ShardedTree):
        holding, in_pieces = node.holding, node.holding.form == "pieces"
        leaves = node.sharding.layout.treedef.flatten_up_to(node.local_tree)
        rows = zip(leaves, holding.parts, strict=True)
        # Frozen leaves have neither gradients nor updates, and a tree that is read only has none
        parts = [part for leaf, part in rows if leaf is not None]
    else:
        return [_EVERYWHERE]
    # One of the copies along the replicate axis. Pieces that are cut over both axes have none.
    saved = axes.replicate.rank == 0 or (axes.both and in_pieces)
    return [
        _EVERYWHERE if part is None else _Spot(part.extent, part.is_whole, saved) for part in parts
    ]


def _parts_spots(step: ShardedStep, state: State) -> list[_Spot]:
    """The spots of the tensors that the gradients' reduction keeps between steps, see
    `sharded.parts`."""
    axes, parts = step.options.axes, step.parts_of(state)
    parts.check(state.parts)

    def spots_of(own: KeptFlat) -> list[_Spot]:
        if own.carried == "sum":
            # A row per rank of the data axes; one of the ranks that are given the same data, and so
            # keep the same row, saves it
            row, size, saved = axes.data.rank, axes.data.size, axes.copy.number == 0
            pairs = zip(own.bucket.shapes, own.bucket.numels, strict=True)
            extents = [Extent((size, *shape), row * n, (row + 1) * n) for shape, n in pairs]
            return [_Spot(extent, False, saved, summed=True) for extent in extents]
        if not own.is_cut:
            return [_EVERYWHERE] * len(own.keys)
        extents = [own.bucket.extent(k, axes.piece_number) for k in range(len(own.keys))]
        return [_Spot(extent, False) for extent in extents]

    spots: list[_Spot] = optree.tree_leaves(
        parts.by_leaf(spots_of), is_leaf=lambda x: isinstance(x, _Spot)
    )
    return spots


def runs_to_save(leaves: list[LocalLeaf], rank: int, num_ranks: int) -> list[Run]:
    """This rank's share of the elements, so that all ranks together save each element once.

    It is all that only this rank has, and an equal share, in bytes, of all that every rank has.
    """
    total = sum(
        h.tensor.nbytes for h in leaves if h.everywhere
    )  # bytes, counted alike on all ranks
    # The leaves that every rank has, one after the other: this rank saves bytes [low, high) of them
    # Cut by bytes and not by leaves: one large embedding must not be one rank's work
    low = total * rank // num_ranks
    high = total * (rank + 1) // num_ranks
    runs = []
    position = 0  # of the leaf, among those bytes
    for i, h in enumerate(leaves):
        start, stop = h.start, h.stop
        if h.everywhere:
            # Elements that begin in this rank's range of bytes
            start = _first_element(h.tensor, low - position)
            stop = _first_element(h.tensor, high - position)
            position += h.tensor.nbytes  # on all ranks alike, also where nothing is saved
        if start < stop and (h.saved or h.everywhere):
            runs.append(Run(i, start, stop - start, h.tensor, start - h.start))
    return runs


def _first_element(tensor: Tensor, byte: int) -> int:
    """The number of the first element that begins at or after a byte; `numel` if none does."""
    number = -(-byte // tensor.element_size())
    return min(max(number, 0), tensor.numel())
