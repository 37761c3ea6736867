"""`ShardedNode`: a tree of which this rank has a part, and whose leaves users see as pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import optree
from torch import Tensor

from ..errors import DonatedError, StructureError
from ..in_a_loss import are_trees_hidden
from ..introspection import name_in_callers
from ..params import OnEngine, Story, register_node
from ..tree import own_copy
from .extent import Extent
from .home import has_ended
from .piece import AsMade, History, Piece, story_from, story_of, text_from


class Fault(NamedTuple):
    """The fault of a leaf, in the words of an error."""

    what: str
    expected: Any
    got: Any
    remedy: str

    def error(self, kind: str, path: str, rank: int) -> StructureError:
        """The error for the leaf at this path, of this kind in words."""
        return StructureError(
            f"{kind} {self.what}",
            path=path,
            expected=self.expected,
            got=self.got,
            rank=rank,
            remedy=self.remedy,
        )


class LeafPart(NamedTuple):
    """The part of a leaf that is here."""

    extent: Extent
    is_whole: bool  # whether every rank holds all of the leaf, by the layout
    shape: tuple[int, ...]  # of the tensor that is here

    @property
    def shape_in_piece(self) -> tuple[int, ...]:
        """Of the tensor that users have."""
        return self.extent.shape if self.is_whole else (self.extent.num_here,)

    def local_of(self, leaf: Any) -> Any:
        """A leaf that users see as this rank holds it; what doesn't fit stays as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.as_cut if isinstance(leaf, Piece) else leaf.detach()
        fits = leaf.shape == self.extent.shape and own.numel() == prod(self.shape)
        return own if own.shape == self.shape or not fits else own.reshape(self.shape)

    def fault_of(self, leaf: Tensor, shape: Sequence[int] | None) -> Fault | None:
        """The fault of a leaf that is given for this part; None: it has none. `shape`: of a plain
        tensor, if it may be one."""
        if isinstance(leaf, Piece):
            if (leaf.extent, leaf.is_whole) == (self.extent, self.is_whole):
                return None
            remedy = "combine leaves of trees that are cut alike, by tree_map"
            return Fault("is a part of another one", self.extent, leaf.extent, remedy)
        if shape is None:
            remedy = "make it by tree_map of a tree that is cut alike, torch.zeros_like say"
            expected = f"a piece, {self.extent}"
            return Fault("is a plain tensor", expected, f"shape {(*leaf.shape,)}", remedy)
        if leaf.shape != shape:
            remedy = "combine leaves elementwise; a piece is 1-D here, and a part of its leaf"
            return Fault("has another shape", shape, (*leaf.shape,), remedy)
        return None


class ShardedNode(OnEngine):
    """A node of a tree that knows how its leaves are cut over ranks.

    Leaves that somebody has read count from then on, since users may put others in their places.
    """

    # Private names, since a state's own fields are reached under all others
    _what: ClassVar[str]  # in words for errors
    _name: ClassVar[str]  # of a variable, in their remedies
    _remedy_in_a_loss: ClassVar[str]  # `{}`: the variable

    @property
    def tree(self) -> Any:
        """This rank's part, as users see it: pieces, numbers and plain tensors, of the original
        structure.

        Raises:
            StructureError: it is read inside of a sharded loss or evaluation; a sharded tree, also
                inside of a transform of torch.func.
            DonatedError: a step has taken its storage.
        """
        self._check_readable()
        self.num_uses += 1
        if self._shown is None:
            treedef, leaves = self._pieces()
            self._made = AsMade.of(self.origin, leaves)
            self._shown = treedef.unflatten(leaves)
        return self._shown

    def _pieces(self) -> tuple[Any, list[Any]]:
        """The structure, and the leaves as users see them, of the local tensors."""
        raise NotImplementedError

    def _piece(
        self, leaf: Any, part: LeafPart | None, path: str, *, trained: bool = False, **lying: Any
    ) -> Any:
        """A local tensor as users see it; a number, or a leaf that all ranks have whole, is itself.

        `lying`: of the tensor, as its `History` says.
        """
        if part is None or not isinstance(leaf, Tensor):
            return leaf
        root = self.path_in_value
        given = None if root is None else text_from(root, path)
        history = History(text_from(self.origin, path), path=given, **lying)
        local = leaf.reshape(part.shape_in_piece)
        return Piece(
            local, part.extent, is_whole=part.is_whole, history=history, requires_grad=trained
        )

    def _check_readable(self) -> None:
        """Raise unless the leaves may be read here."""
        # Inside of a loss leaves would be pieces, and the loss silently another one
        if are_trees_hidden():
            name = name_in_callers(self)
            raise StructureError(
                f"{self._what} was read inside of a sharded loss or evaluation, which is refused "
                "at every level, since its leaves may be pieces",
                path=name,
                expected="whole tensors",
                got=self,
                rank=self.of_rank,
                remedy=self._remedy_in_a_loss.format(name or self._name),
            )
        self._check_not_used_up()

    def _check_not_used_up(self) -> None:
        """Raise if a step has taken the storage."""
        if self.is_used_up:
            raise DonatedError(
                f"{self._what} was donated to a step, and its storage holds the next one now. "
                "Remedy: use the one of the state that the step returned, keep a copy with "
                f"tree_map(torch.clone, {self._name}), or shard with donate=False"
            )

    @property
    def is_used_up(self) -> bool:
        """Whether a step has taken its storage, or that of leaves which `tree_map` has put here."""
        return any(map(has_ended, self.leases))

    @property
    def story(self) -> Story:
        """How the leaves were made: see Note [words] in `piece`."""
        if self._shown is None:
            return story_from(self.origin, self.holding)
        return story_of(self._shown_leaves(), self.holding, self._made)

    def _shown_leaves(self) -> list[Any]:
        """The leaves that users see, in the order of the parts."""
        raise NotImplementedError

    def held_as(self, holding: Any) -> Self:
        """A node of these leaves under a holding of the same cut, which nobody has read."""
        if not self.are_leaves_shown and self.origin and holding is self.holding:
            return self
        made = self._unread(holding)
        made.origin = self.story.origin
        return made

    def twin(self) -> Self:
        """Another node of these leaves, for somebody who may put others in the places of its
        own. Both are used up together."""
        made = self._unread(self.holding)
        made.origin = self.origin
        return made

    def _unread(self, holding: Any) -> Self:
        """A node of these leaves, of which it has no pieces."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A node of its own on the same ranks, trained where this one is."""
        made: Self = optree.tree_map(own_copy, self)
        return made


def register_sharded(kind: type[ShardedNode], of_shown: Callable[[Any, Any], Any]) -> None:
    """Make a class a node of trees; `of_shown`: (leaves as users see them, holding) -> node."""

    # One child, under no name: trees go into the user's own, whose paths stay as they are
    def flatten(node: Any) -> tuple[list[Any], Any, tuple[str]]:
        return [node.tree], node.holding, ("",)

    def unflatten(holding: Any, children: Any) -> Any:
        (tree,) = children
        return of_shown(tree, holding)

    register_node(kind, flatten, unflatten)
