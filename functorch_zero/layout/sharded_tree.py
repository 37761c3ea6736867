"""`ShardedTree`: a tree that knows how it is cut over ranks, as one of them holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import is_
from typing import Any, Literal, NoReturn

import optree
import torch
from torch import Tensor

from .._torch_private import transforms_active
from ..errors import StructureError, first_few
from ..in_a_loss import OF_THIS_RANK
from ..params import Engine
from ..tree import PyTree, requiring_grad
from .extent import Rows
from .flat_buffers import (
    Fill,
    cut,
    filled,
    messages_of,
    own_piece,
    pack,
    pack_pieces,
    slice_flat,
    to_tree,
    unpack,
)
from .home import Home, Published, has_ended
from .layout import Bucket, Layout
from .levels import level_of
from .node import Fault, LeafPart, ShardedNode, register_sharded
from .piece import home_of, leases_of
from .sharding import Sharding

Form = Literal["held", "pieces"]
_FORMS: dict[Form, str] = {"held": "as params are held", "pieces": "in pieces, as gradients are"}


@dataclass(frozen=True)
class Holding:
    """The static part of a sharded tree: equal for trees that fit each other, of which other leaves
    may be trained.

    Attributes:
        sharding: how the tree is cut, and which rank's part this is.
        form: "held", as params are held between steps: whole leaves at levels 0 to 2, this rank's
            1-D pieces at level 3, and at levels 1 and 2 where they are published in fewer bytes
            than they are stored in. Or "pieces", as gradients, updates and the optimizer's view of
            params are: 1-D pieces at every level, those of level 0 being all of the leaf.
        engine: answers for the tree on its ranks. Not compared, and not pickled.
        number: of the tree among those that the engine has cut, from 1; 0 has none. Not compared.
        read_only: whether no leaf is trained, although the layout trains some: a program's average
            of its params, say, which is cut as they are. Not compared.
        name: of the tree for people: its path in a program's value, or the argument of `init` that
            it was cut from; "" has none. Not compared.
    """

    sharding: Sharding
    form: Form
    engine: Engine | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)
    read_only: bool = field(default=False, compare=False, repr=False, kw_only=True)
    name: str = field(default="", compare=False, repr=False, kw_only=True)

    @property
    def label(self) -> str:
        """The tree's name and number, the same on all ranks. Its gradients have the same."""
        return f"{self.name!r} (tree {self.number})" if self.name else f"tree {self.number}"

    @cached_property
    def trained(self) -> Sequence[bool]:
        """Per leaf in tree order, whether it is trained."""
        trained = self.sharding.layout.trained
        return [False] * len(trained) if self.read_only else trained

    @cached_property
    def in_pieces(self) -> Holding:
        """How gradients and updates of this tree are held: in pieces, by its engine and number."""
        return replace(self, form="pieces", read_only=False)

    def __eq__(self, other: object) -> bool:
        """Whether the leaves are of the same elements, so that `tree_map` may pair them."""
        if not isinstance(other, Holding):
            return NotImplemented
        ours, theirs = self.sharding, other.sharding
        if (self.form, ours.rank, ours.mesh) != (other.form, theirs.rank, theirs.mesh):
            return False
        # By identity first: comparing layouts takes longer
        return ours.layout is theirs.layout or ours.layout.leaf_cuts == theirs.layout.leaf_cuts

    def __hash__(self) -> int:
        return hash((self.form, self.sharding.rank, self.sharding.mesh))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the engine, which is bound to this process's groups and connections
        made = partial(Holding, read_only=self.read_only, name=self.name)
        return made, (self.sharding, self.form)

    def __deepcopy__(self, memo: dict[int, Any]) -> Holding:
        """Itself: copies of a tree lie on the ranks that the tree lies on."""
        return self

    def __repr__(self) -> str:
        # optree prints this where trees that don't fit are given to one `tree_map`
        remedy = {
            "held": "fz.pieces(params) gives them in pieces",
            "pieces": "fz.apply_updates adds them to params",
        }
        cut = f"{self.sharding.in_words}{', read only' if self.read_only else ''}"
        text = f"{_FORMS[self.form]} ({remedy[self.form]}), cut as {cut}"
        return f"{text} (fz.shard_tree(tree, layout_like=params) cuts a tree as params are cut)"

    def views(self, flat: Tensor | Rows, bucket: Bucket) -> Sequence[Tensor | Rows]:
        """The bucket's leaves as views of its flat; rows are its one leaf.

        Args:
            flat: in pieces (piece,); held, (numel,), or (bucket.held.piece,) where ranks hold
                pieces.
        """
        if isinstance(flat, Rows):
            return [flat]
        if self.form == "held" and self.is_whole(bucket):
            return unpack(flat, bucket)
        return cut(flat, *self.cut_of(bucket))

    def cut_of(self, bucket: Bucket) -> tuple[Bucket, int]:
        """A bucket as the tree is cut, and the number of this rank's piece of it. See Note [two
        cuts] in `layout`."""
        number = self.sharding.piece_number
        if self.form == "pieces":
            return bucket, number
        return bucket.held, bucket.held_by(number)

    def is_whole(self, bucket: Bucket) -> bool:
        """Whether every rank holds all of the bucket, by its cut."""
        if self.form == "pieces":
            return not level_of(bucket).cuts_state
        return not bucket.cut.holds_pieces

    @property
    def paths(self) -> Sequence[str]:
        """Of the leaves, in tree order."""
        return self.sharding.layout.paths

    @cached_property
    def parts(self) -> Sequence[LeafPart]:
        """Per leaf in tree order, the part of it that is here."""
        layout, found = self.sharding.layout, []
        for b, k in layout.in_buckets:
            bucket, number = self.cut_of(layout.buckets[b])
            extent, is_whole = bucket.extent(k, number), self.is_whole(layout.buckets[b])
            is_shaped = is_whole and self.form == "held"
            shape = extent.shape if is_shaped else (extent.num_here,)
            found.append(LeafPart(extent, is_whole, shape))
        return found

    def pack(self, leaves: Sequence[Tensor], bucket: Bucket) -> Tensor:
        """The inverse of `views`: a new flat, that the leaves are copied to."""
        if self.form == "held" and self.is_whole(bucket):
            return pack(leaves, bucket, device=leaves[0].device)
        return pack_pieces(leaves, *self.cut_of(bucket))


class ShardedTree(ShardedNode):
    """This rank's part of a tree, and how the tree is cut: a pytree node around the part.

    `tree_map` goes into it and gives a ShardedTree again. A leaf is reached as in the tree itself,
    `params["head.weight"]`; `tree` is the tree without the node. Its leaves are `Piece`s.
    `local_tree` has plain tensors, for this library.

    The local tensors are views of flat buffers, one per bucket, which the node remembers, and its
    pieces do: collectives and kernels move whole buckets. Leaves from elsewhere are packed.

    Args:
        tree: of pieces, or of plain tensors where every rank holds the whole leaf.
        holding: how it is cut.

    Attributes:
        holding, leases, origin, path_in_value, num_uses: as of all nodes.
    """

    holding: Holding
    _what, _name = "a sharded tree", "params"
    _remedy_in_a_loss = (
        "pass it to the loss, value_and_grad(loss)(params, {0}); for a training step, with the "
        "batch as fz.unshard({0})"
    )
    without_engine = (
        "a sharded tree that was pickled has no group of ranks. Remedy: use the step that made its "
        "state, or shard the whole tree again with fz.shard_tree"
    )

    def __init__(self, tree: PyTree[Tensor], holding: Holding):
        super().__init__(holding, tree)
        self._local: Any = None  # the local tensors, once they are cut
        # By bucket, where nobody has read the leaves; None: they are None, or lie anywhere
        self._homes: list[Home | None] = []
        self._is_packed = False  # whether no leaf lies anywhere
        self.leases = () if tree is None else leases_of(optree.tree_leaves(tree))

    @classmethod
    def of_local(
        cls,
        tree: PyTree[Tensor | None],
        holding: Holding,
        homes: Sequence[Home | None] | None = None,
    ) -> ShardedTree:
        """The tree of these local tensors. `homes`: by bucket, that which its leaves are cut from;
        None: they lie anywhere."""
        made = cls(None, holding)
        made._local = tree
        made._homes = [*homes] if homes else [None] * len(holding.sharding.layout.buckets)
        return made

    @classmethod
    def of_flats(cls, flats: Sequence[Tensor | Rows | None], holding: Holding) -> ShardedTree:
        """The tree whose leaves are views of these flats, one per bucket of the layout; None: the
        bucket's leaves are None. Rows are their bucket's one leaf."""
        rows = zip(flats, holding.sharding.layout.buckets, strict=True)
        homes = [None if x is None else Home(x, (holding.form, bucket)) for x, bucket in rows]
        return cls.of_homes(homes, holding)

    @classmethod
    def of_homes(cls, homes: Sequence[Home | None], holding: Holding) -> ShardedTree:
        """The tree whose leaves are views of these homes' flats, which may be another's, too; None:
        the bucket's leaves are None."""
        made = cls(None, holding)
        made._homes, made._is_packed = [*homes], True
        return made

    @property
    def sharding(self) -> Sharding:
        """How the tree is cut."""
        return self.holding.sharding

    def _check_readable(self) -> None:
        super()._check_readable()
        # Its gradient by the leaves would be that of this rank's batch
        if transforms_active():
            raise StructureError(
                "a sharded tree was given to a transform of torch.func, or was read inside of "
                "one, which knows nothing of other ranks",
                got=self,
                rank=self.sharding.rank,
                remedy="fz.value_and_grad(loss)(params, ...) takes gradients of sharded trees; "
                "put the transform inside of its loss, by whole = fz.unshard(params). "
                f"{OF_THIS_RANK}",
            )

    def _pieces(self) -> tuple[Any, list[Any]]:
        layout, holding = self.sharding.layout, self.holding
        # Gradients and updates have none themselves
        trained = holding.trained if holding.form == "held" else [False] * len(layout.leaves)
        columns = self._leaves(), holding.parts, layout.paths, trained, layout.in_buckets
        made = [
            self._piece(leaf, part, path, trained=on, lease=self._homes[b], number=k)
            for leaf, part, path, on, (b, k) in zip(*columns, strict=True)
        ]
        return layout.treedef, made

    @property
    def local_tree(self) -> PyTree[Tensor | None]:
        """This rank's part in plain tensors, without gradients: whole leaves, or 1-D pieces (n,).

        Raises:
            StructureError: a leaf is not what the layout says.
            DonatedError: a step has taken its storage.
        """
        self._make_dense()
        return self.local_rows

    @property
    def local_rows(self) -> PyTree[Tensor | Rows | None]:
        """This rank's part, in which gradients and updates of tables may be `Rows`, until somebody
        asks for all elements of one of them; else as `local_tree`."""
        self._check_not_used_up()
        if self._shown is not None:
            return self.sharding.layout.treedef.unflatten(self._leaves())
        if self._local is None:
            layout = self.sharding.layout
            parts: list[Sequence[Tensor | Rows | None]] = []
            for home, bucket in zip(self._homes, layout.buckets, strict=True):
                if home is None:
                    parts.append([None] * len(bucket.leaves))
                    continue
                if home.leaves is None:
                    home.leaves = self.holding.views(home.flat, bucket)
                parts.append(home.leaves)
            self._local = to_tree(parts, layout)
        return self._local

    def _make_dense(self) -> None:
        """Hold tensors in place of `Rows`."""
        layout = self.sharding.layout
        if self._shown is not None or self.holding.form == "held" or not layout.has_tables:
            return
        leaves: list[Any] = layout.treedef.flatten_up_to(self.local_rows)
        homes = [*self._homes]  # trees of the same leaves share the list
        for b, bucket in enumerate(layout.buckets):
            rows = leaves[bucket.leaves[0]]
            if isinstance(rows, Rows):
                flat = rows.values.new_zeros(bucket.piece)
                rows.add_to(flat)
                views = self.holding.views(flat, bucket)
                homes[b] = Home(flat, (self.holding.form, bucket), views)
                (leaves[bucket.leaves[0]],) = views
        self._homes, self._local = homes, layout.treedef.unflatten(leaves)

    @property
    def in_words(self) -> str:
        """The form, and how the tree is cut, in words for errors."""
        return f"{_FORMS[self.holding.form]}, cut as {self.sharding.in_words}"

    @property
    def as_it_lies(self) -> PyTree[Tensor]:
        """The local tensors: no storage moves them."""
        return self.local_tree

    @property
    def tensors(self) -> list[Any]:
        """Flats, which count the writes to their leaves; leaves, once somebody has read them."""
        return self.flats() if self.is_uncut else super().tensors

    def with_local(self, tree: PyTree[Tensor | None]) -> ShardedTree:
        """A tree of other local tensors, held as this one is; some may be these."""
        layout = self.sharding.layout
        leaves = layout.treedef.flatten_up_to(tree)
        homes = [
            home if home and home.is_of([leaves[n] for n in bucket.leaves]) else None
            for home, bucket in zip(self.known_homes, layout.buckets, strict=True)
        ]
        return ShardedTree.of_local(tree, self.holding, homes)

    def flats(self) -> list[Any]:
        """The flat of each bucket, which its leaves are views of (None: the leaves are None).

        Raises:
            StructureError: a leaf is not what the layout says.
            DonatedError: a step has taken its storage.
        """
        return [None if home is None else home.flat for home in self.homes()]

    def homes(self) -> list[Home | None]:
        """By bucket, that which its leaves are cut from; those that lie anywhere are copied to new
        ones.

        Raises:
            StructureError, DonatedError: as `flats`.
        """
        self._check_not_used_up()
        self._make_dense()
        # The usual case: one step's result is the next one's argument
        if self.is_uncut:
            return self._homes
        # Leaves from outside: `tree_map` or assignment made them
        self.check_leaves()
        leaves, holding, homes = self._leaves(), self.holding, self.known_homes
        for b, bucket in enumerate(self.sharding.layout.buckets):
            # In bucket order; all None, or none
            own: list[Any] = [leaves[n] for n in bucket.leaves]
            if homes[b] is None and own[0] is not None:
                with torch.no_grad():
                    flat = holding.pack(own, bucket)
                homes[b] = Home(flat, (holding.form, bucket))
        # Those of leaves that users have are not remembered: these may be written to
        if self._shown is None:
            self._homes, self._local, self.leases, self._is_packed = homes, None, (), True
        return homes

    @property
    def known_homes(self) -> list[Home | None]:
        """By bucket, that which its leaves are cut from; None: they are None, or lie anywhere."""
        if self._shown is None:
            return [*self._homes]
        shown = self._shown_leaves()
        homes: list[Home | None] = []
        for bucket in self.sharding.layout.buckets:
            home = home_of([shown[n] for n in bucket.leaves])
            # Of a bucket of the same shapes, say, it isn't
            is_ours = home is not None and home.kind == (self.holding.form, bucket)
            homes.append(home if is_ours else None)
        return homes

    def check_leaves(self, *, some: bool = False) -> None:
        """Raise unless each leaf is what the layout says: functions that `tree_map` has run, or
        assignments, may have made others. With `some`, any leaf may be None."""
        # Leaves not cut yet come from flats of our own
        if self.is_uncut:
            return
        layout, holding = self.sharding.layout, self.holding
        are_shown = self._shown is not None
        leaves = (
            self._shown_leaves() if are_shown else layout.treedef.flatten_up_to(self.local_rows)
        )
        rows = zip(leaves, layout.in_buckets, holding.trained, holding.parts, strict=True)
        for n, (leaf, (b, _), is_trained, part) in enumerate(rows):
            # Rows are made by the library alone
            if (some and leaf is None) or isinstance(leaf, Rows):
                continue
            fault = _fault_of(leaf, layout.buckets[b], holding.form, is_trained=is_trained)
            if fault is None and leaf is not None:
                shape = part.shape_in_piece if are_shown else part.shape
                fault = part.fault_of(leaf, shape if part.is_whole or not are_shown else None)
            if fault:
                kind = f"a leaf of a sharded tree, {holding.form},"
                raise fault.error(kind, layout.leaves[n].path, self.sharding.rank)

    @property
    def trained(self) -> Sequence[bool]:
        """Per leaf of a held tree, in tree order, whether it is trained: as the tree was cut; of
        leaves that somebody has read, whether it requires grad, as of a whole tree."""
        self._check_not_used_up()
        return (
            requiring_grad(self._shown_leaves()) if self.are_leaves_shown else self.holding.trained
        )

    @property
    def is_read_only(self) -> bool:
        """Whether no leaf of a held tree is trained. What `tree_map` makes of params without
        gradients is such a tree.

        Raises:
            StructureError: some leaves are trained, and not those that the tree was cut for.
            DonatedError: a step has taken its storage.
        """
        trained, layout = self.trained, self.sharding.layout
        if not any(trained):
            return True
        # Leaves that nobody has read are as they were cut
        rows = zip(layout.leaves, trained, strict=True) if self.are_leaves_shown else ()
        for leaf, on in rows:
            if on != leaf.trainable:
                self.check_leaves()  # one that is no tensor, say
                raise StructureError(
                    "other leaves of a sharded tree require grad than when it was cut",
                    path=leaf.path,
                    expected=f"requires_grad={leaf.trainable}",
                    got=f"requires_grad={on}",
                    rank=self.sharding.rank,
                    remedy="choose trained leaves in the tree that is cut; later change all of "
                    "them alike",
                )
        return False

    @property
    def is_uncut(self) -> bool:
        """Whether all leaves are cut from flats of its own, and nobody has read them."""
        return self._is_packed and self._shown is None

    def _unread(self, holding: Holding) -> ShardedTree:
        # Leaves of params that somebody has are cut anew, without the gradients that theirs may
        # have by now
        if self.are_leaves_shown and holding.form == "held":
            return ShardedTree.of_homes(self.homes(), holding)
        local = self.local_tree if self.are_leaves_shown else self._local
        made = ShardedTree.of_local(local, holding, self.known_homes)
        made._is_packed = self.is_uncut
        made.leases = [*self.leases, *filter(None, self._homes)]
        return made

    @property
    def holding_as_shown(self) -> Holding:
        """The holding, read only where leaves that somebody has read are so: see `is_read_only`."""
        read_only, holding = self.is_read_only, self.holding
        is_so = read_only == holding.read_only
        return holding if is_so else replace(holding, read_only=read_only)

    def with_flats(self, flats: Sequence[Any], holding: Holding) -> ShardedTree:
        """A tree with leaves in these flats, and a holding of the same cut: this one's leaves,
        where they lie there already."""
        homes, made = self.known_homes, self
        is_same = all(map(is_, flats, [home and home.flat for home in homes]))
        # Of all buckets: `with_flats` keeps the node, and the leaves that users hold
        if not is_same or holding is not self.holding:
            made = ShardedTree.of_flats(flats, holding)
            for b, home in enumerate(homes):
                # Another tree may have leaves of a flat that stays
                if home is not None and home.flat is flats[b]:
                    made._homes[b] = home
        return made

    def published(self) -> list[Tensor | None]:
        """By bucket, the published flat; None where there is none, or none any more, since
        somebody has written to the piece. See Note [published flats] in `layout`."""
        return [
            None if home is None or home.published is None else home.published.of(home.flat)
            for home in self.known_homes
        ]

    def note_published(self, published: Sequence[Tensor | None]) -> None:
        """Note the published flats of the leaves as they are now, by bucket. Leaves that lie in no
        flats have no place for them."""
        for home, x in zip(self.known_homes, published, strict=True):
            if home is not None:
                home.published = None if x is None else Published(x, home.flat)

    def handed_on(self) -> ShardedTree:
        """A node with these leaves for a step that will write to its flats, where leaves are
        trained; this node is used up, and all that have leaves of those flats."""
        # Frozen flats stay with all that have leaves of them, so that a load which writes over them
        # uses these up
        self._check_not_used_up()
        # Rows of tables stay rows
        homes = [*self._homes] if self.is_uncut else [*self.homes()]
        # Views of the same flats, unless users may have leaves of this node
        local = self._local if self.is_uncut else None
        for b, bucket in enumerate(self.sharding.layout.buckets):
            if bucket.trainable and (home := homes[b]) is not None:
                homes[b] = home.handed_on()
        made = ShardedTree.of_homes(homes, self.holding)
        made._local = local
        return made

    @property
    def is_used_up(self) -> bool:
        """Also by the flats of leaves that nobody has read."""
        return any(map(has_ended, (*self.leases, *filter(None, self._homes))))

    def pieces(self) -> ShardedTree:
        """The trained leaves in the form of pieces, as views; None elsewhere."""
        return pieces_of(self.flats(), self.holding)

    def _shown_leaves(self) -> list[Any]:
        leaves: list[Any] = self.sharding.layout.treedef.flatten_up_to(self._shown)
        return leaves

    def _leaves(self) -> list[Any]:
        """The local tensors, in tree order; None where masked."""
        if self._shown is None:
            leaves: list[Any] = self.sharding.layout.treedef.flatten_up_to(self.local_tree)
            return leaves
        rows = zip(self._shown_leaves(), self.holding.parts, strict=True)
        return [part.local_of(leaf) for leaf, part in rows]

    def __reduce__(self) -> tuple[Any, ...]:
        # Engine and memory of flats stay behind; see `Holding.__reduce__`
        return ShardedTree.of_local, (self.local_tree, self.holding)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"a sharded tree takes no assignment, and its leaf {key!r} was assigned to. Remedy: "
            "make a new tree, by tree_map, by optree.tree_map_with_path to go by the path, or by "
            "fz.apply_updates(params, updates)"
        )

    def __repr__(self) -> str:
        """The whole leaves' shapes, without values: inside of a loss there are none to read."""
        if self.is_used_up:
            return f"ShardedTree(donated to a step, {self.holding!r})"
        form = _FORMS[self.holding.form]
        return f"ShardedTree({{{shapes_of(self.sharding.layout)}}}, {form}, {self.sharding})"


def is_held(node: Any) -> bool:
    """Whether this is a sharded tree in the form of params, whose leaves a loss may use."""
    return isinstance(node, ShardedTree) and node.holding.form == "held"


def shapes_of(layout: Layout, most: int = 4) -> str:
    """The whole leaves by path: "w: (2, 3) torch.float32"; `most` of them."""
    found = [f"{leaf.path or '(root)'}: {leaf.shape} {leaf.dtype}" for leaf in layout.leaves]
    return first_few(found, most)


def _fault_of(leaf: Any, bucket: Bucket, form: Form, *, is_trained: bool) -> Fault | None:
    """The fault of a leaf that lies in this bucket; None: it has none."""
    # In pieces, frozen leaves have neither gradients nor updates
    if form == "pieces" and not is_trained:
        if leaf is None:
            return None
        return Fault("is given for a frozen leaf", None, type(leaf).__name__, "leave it None")
    if not isinstance(leaf, Tensor):
        remedy = "give each leaf a tensor; zeros, where an update is to change nothing"
        return Fault("is no tensor", "a tensor", type(leaf).__name__, remedy)
    if leaf.layout != torch.strided:
        return Fault("is sparse", torch.strided, leaf.layout, "pass leaf.to_dense()")
    # Gradients and updates may be of another dtype than params: only held leaves are compared
    if form == "held" and leaf.dtype != bucket.dtype:
        remedy = "cast the whole tree, and cut that with fz.shard_tree(tree, level=, group=)"
        return Fault("has another dtype", bucket.dtype, leaf.dtype, remedy)
    return None


def hold(whole: PyTree[Tensor | None], holding: Holding, fill: Fill | None = None) -> ShardedTree:
    """Whole leaves -> this rank's part of them, in storage of its own. None stays None.

    `fill` gives the values of one bucket's leaves at a time, for trees without.
    """
    layout = holding.sharding.layout
    leaves = layout.treedef.flatten_up_to(whole)
    flats: list[Tensor | None] = []
    published: list[Tensor | None] = []
    for b, bucket in enumerate(layout.buckets):
        # Whole leaves, in bucket order; all None, or none
        own = filled(leaves, layout, b, fill)
        if own[0] is None:
            flats.append(None)
            published.append(None)
            continue
        # (held piece,), this rank's; where every rank holds all of it, (numel,)
        flats.append(slice_flat(own, *holding.cut_of(bucket)))
        # The first time without communication: all ranks have the whole leaves
        message = None
        if holding.form == "held" and bucket.is_published:
            message = messages_of(pack(own, bucket, device=own[0].device), bucket)
        published.append(message)
    made = ShardedTree.of_flats(flats, holding)
    made.note_published(published)
    return made


def own_pieces(flats: Sequence[Tensor], holding: Holding) -> list[Tensor | None]:
    """Of flats as they are held, this rank's pieces (piece,): views; None where frozen."""
    layout, piece_number = holding.sharding.layout, holding.sharding.piece_number
    return [
        # A view of the held flat, or all of it; see Note [two cuts] in `layout`
        own_piece(flat, bucket, piece_number) if bucket.trainable else None
        for flat, bucket in zip(flats, layout.buckets, strict=True)
    ]


def pieces_of(flats: Sequence[Tensor], holding: Holding) -> ShardedTree:
    """Of flats as they are held, this rank's pieces of the trained leaves: views; else None."""
    return ShardedTree.of_flats(own_pieces(flats, holding), holding.in_pieces)


register_sharded(ShardedTree, ShardedTree)
