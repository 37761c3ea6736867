"""The path of a unit through one pass: entered, gathered, left; in backward gathered again, its
gradients packed and reduced.

A `Pass` is one forward and backward of a loss, and the one owner of all that it needs: the units'
flats, the uses that backward has not come to, the gathers ahead and the reductions. The parts it
owns (`unshard.py`, `reduce.py`, `prefetch.py`) are passive: none calls back. Three doors lead to
it: a unit's `Entrance` in forward; in backward the saved-tensor hook (`on_first_use`) and the
unit's one autograd node (`on_backward`). Exchanges of the loss have two more, `exchange` and
`on_exchange`. The node is made at entry, so the engine runs it right after the unit's own backward:
it orders ready nodes by creation, newest first.

Note [order of reductions]: ranks must start the same collectives in the same order, even when one
rank's loss does not reach a unit. Reductions therefore start in the reverse of the order of uses.
For a use that backward has passed by, a rank sends zeros, and gathers what its backward would have
gathered, in that order: a unit around others, with a leaf that is used after them, comes before
them. Where nothing but whole gradients is reduced in backward, at levels 0 and 1 alone, they start
in the reverse of the layout's order. Each unit then comes once. Elsewhere ranks make sure that
their losses use the same units: see Note [same uses] in `same_uses.py`.
A loss may start exchanges of its own, see `exchange.py`. They have their places among the uses. In
the layout's order, where uses may differ by rank, reductions wait until backward has come to all
exchanges.

Note [where backward is]: autograd numbers its nodes as they are made, and runs the newest that is
ready. So when it runs a node, uses that are newer have been passed by if they have no gradients by
then. A use's own number tells: it begins with that of the next node, and its place among the open
ones sets apart uses without a node between them. The node that asks for a saved leaf may be newer
than uses that began after the leaf's own: a unit around others uses a leaf after them, too, where
it holds a tied embedding. Each thread counts nodes by itself. So a pass runs its backward in the
thread that runs the loss (`given_batch` sees to it). By default torch runs that of a GPU's tensors
in a thread of the device, which would number the nodes of a backward inside of the loss from its
own.

Note [one stream]: what a pass gathers and packs is allocated, waited for and freed in the order of
one stream of its device: that of the call. A unit used on another stream would find leaves that
have not arrived there, and other tensors would take their place while it reads them. It is refused.
Work without params may run on any stream. In backward the engine goes back to the stream on which
forward made a node.

Note [direct uses]: a custom `autograd.Function` that is given a lazy parameter outside of its unit
reads the whole leaf, and autograd has the gradient for the lazy parameter itself. It comes to the
node that handed out all of them, at the very end of backward: that node is the oldest. Ranks must
know before that the unit has one more reduction to come, so the read tells. It is reduced after all
others, in the order of the reads, and as zeros where no gradient came.

Note [peak of backward]: a unit's backward needs most memory when it begins: its activations are all
there. So to save memory, the reduction under way and the next gather wait until it asks for its
second saved leaf; most of its work still hides them. One whose first was nearly all of it, such as
a head, has no work left to hide them: there they wait until it is done. See `Overlap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch_private import (
    NO_BACKWARD,
    backward_number,
    hooks_of,
    in_custom_function,
    innermost_saved_tensors_hooks,
    neg_view,
    next_node_number,
    recompute,
    running_node_number,
    storage_id,
    transforms_active,
    version_of,
)
from ..errors import StructureError
from ..layout.flat_buffers import is_flat, pack
from ..layout.layout import Layout, Unit, UnitContent
from ..model.lazy_param import LazyParam, handed_out, make_lazy_param, outside_modes
from ..model.lazy_table import Found, LazyTable
from ..model.untouched import Untouched, changed_in_place, marks_of_values
from ..places import ByUnit, Place
from ..profiling import NOTHING
from ..tree import has_values, is_flagged
from .exchange import (
    Exchange,
    Exchanged,
    ReceivedAgain,
    differentiated_inside,
    ran_again,
    region_of,
    transformed,
)
from .prefetch import Following, Overlap, PrefetchOrder
from .reduce import GradientReduction
from .same_uses import SameUses
from .saved_there import PlacedTensor, SavedThere
from .table import Lookup, TableFlats
from .two_seeds import CantBeTried, TwoSeeds
from .unshard import UnitFlats

Grads = Sequence[Tensor | None]  # of a unit's leaves, whole, in the unit's order
Number = tuple[int, ...]  # of a use; () is before all, see Note [where backward is]


class Scale(Protocol):
    """A pass's factor of its packed gradients, known when the loss has returned."""

    def __call__(self, flat: Tensor, *, is_own: bool) -> Tensor:
        """The scaled flat (numel,) of a bucket's gradients; one that is not this pass's own is
        only read."""
        ...


class UnitInPass:
    """One unit during one pass."""

    leaves: Sequence[Tensor] | None = None  # whole, as the model uses them now
    tracked = False  # whether gradients flow back from those leaves
    depth = 0  # calls of its modules that have not returned
    use: Use | None = None  # the last one
    num_open = 0  # uses that backward has not come to
    storages: Sequence[int] = ()  # that those leaves lie in
    is_reduced = False  # whether its gradients are on their way, in the layout's order
    recomputing = False  # whether it runs again for the backward of its last open use

    def __init__(self, index: int, unit: Unit, content: UnitContent, flats: UnitFlats):
        self.index = index  # in the layout
        self.name, self.path, self.modules = unit.name or "root", unit.path, unit.modules
        self.content, self.flats = content, flats
        # Its flats: those that are here when the pass begins, others while their values are looked
        # at
        self.untouched: Untouched | None = None
        self.left: set[str] = set()  # modules whose calls have returned


@dataclass(slots=True, eq=False)
class Use:
    """One use of a unit, from the moment it is entered to its gradients."""

    unit: int  # its index in the layout
    number: Any  # a Number; None: run again in backward, which brings no gradients of its own
    # Elements of gathered leaves that its backward will ask for; under other hooks 1, since a
    # recomputation will ask
    saved: int = 0


class SavedLeaf(NamedTuple):
    """The place of a tensor that lies in a gathered flat, which autograd keeps instead of it."""

    use: Use
    k: int  # the unit's k-th flat
    dtype: torch.dtype
    offset: int  # in elements of that dtype
    size: torch.Size
    stride: tuple[int, ...]
    conj: bool  # lazily conjugated: as `w.conj()` and `w.mH` are
    neg: bool  # lazily negated: as `w.conj().imag` is


class SavedTensor(NamedTuple):
    """Any other tensor, as autograd keeps it."""

    tensor: Tensor
    version: int


_PLACED_FROM = 4096  # bytes: a page, of which a mapped file takes whole ones


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # (pack, unpack) of saved tensors


class SavedByOthers(NamedTuple):
    """The pack of hooks around the unit: of any other tensor, or of a leaf to be compared."""

    packed: Any
    leaf: SavedLeaf | None


Saved = SavedLeaf | PlacedTensor | SavedTensor | SavedByOthers


class PassHooks:
    """The pass's hooks on saved tensors: those in gathered flats are remembered by the pass. Others
    lie in a place, where there is one.

    A user's hooks may be around the unit, torch's `save_on_cpu` say, and are given the others then.
    An unsharded step gives them its leaves, too. So they must bring back what they are given: seen
    at the leaves of the first use in a pass that is looked at.
    """

    def __init__(self, around: Pass, place: Place | None, theirs: Hooks | None):
        self.around, self.place, self.theirs = around, place, theirs

    def remember(self, tensor: Tensor) -> Saved:
        """Autograd saves a tensor for backward."""
        leaf = self.around.saved_leaf_of(tensor)
        if self.theirs is not None and (leaf is None or self.around.compares(leaf.use)):
            return SavedByOthers(self.theirs[0](tensor), leaf)
        if leaf is not None:
            return leaf
        if self.place is not None and self._moves_to(self.place, tensor):
            return self.around.saved_there.leave(self.place, tensor)
        return SavedTensor(tensor, version_of(tensor))

    def _moves_to(self, place: Place, tensor: Tensor) -> bool:
        is_large = tensor.nbytes >= _PLACED_FROM
        return is_large and self.around.moves(tensor) and not place.holds(tensor)

    def recall(self, saved: Saved) -> Tensor:
        """Autograd asks for a tensor that it has saved."""
        if isinstance(saved, SavedTensor):
            if version_of(saved.tensor) != saved.version:  # as autograd does without hooks
                raise _changed(saved.tensor, saved.version)
            return saved.tensor
        if isinstance(saved, SavedLeaf):
            return self.around.on_first_use(saved.use, saved)
        if isinstance(saved, PlacedTensor):
            return self.around.saved_there.recall(saved)
        assert self.theirs is not None
        again = self.theirs[1](saved.packed)
        if saved.leaf is None:
            return again
        leaf = self.around.on_first_use(saved.leaf.use, saved.leaf)
        if not _are_same(leaf, again):
            raise _changed_by_hooks(self.around.name_of(saved.leaf.use), self.theirs)
        return leaf


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, to the bit; those of a plan have none."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return not has_values(a) or torch.equal(marks_of_values(a), marks_of_values(b))


class UnitEntrance:
    """The `Entrance` of one unit's lazy parameters: how forward enters and leaves it."""

    __slots__ = ("around", "unit")

    def __init__(self, around: Pass, unit: UnitInPass):
        self.around, self.unit = around, unit

    def enter(self, module: str) -> Sequence[Tensor]:
        unit = self.unit
        self.around.refuse_aside()
        # The same module again, from outside: a unit used twice in one loss
        if unit.depth == 0 and module in unit.left:
            self.around.drop_leaves(unit)  # a use of its own
        leaves = self._use()
        unit.depth += 1
        return leaves

    def leave(self, module: str) -> None:
        unit = self.unit
        unit.depth -= 1
        unit.left.add(module)
        # Modules of one unit may be called apart: a norm, then the head
        if unit.depth == 0 and unit.left.issuperset(unit.modules):
            self.around.on_leave(unit)

    def touch(self) -> Sequence[Tensor]:
        around = self.around
        forward = around.anchor is not None and backward_number() == NO_BACKWARD
        if forward and self.unit.content.trained and in_custom_function():
            around.open_direct_use(self.unit)
        return self._use()

    def _use(self) -> Sequence[Tensor]:
        """The whole leaves, of the use that goes on or of a new one."""
        unit, around = self.unit, self.around
        around.check_use(unit)
        # It runs again for backward: whole leaves of a later use are gone on ranks that came by it
        around.pass_by_newer()
        # Without an anchor no gradients are wanted; without grad mode none can flow
        tracked = around.anchor is not None and torch.is_grad_enabled()
        # Untracked leaves won't do where gradients are wanted: those need a node
        if unit.leaves is not None and (unit.tracked or not tracked):
            return unit.leaves  # the use goes on
        # Collectives and the node belong to the loss, not to a transform or a mode inside of it
        in_a_mode = transforms_active() or torch.is_inference_mode_enabled()
        with outside_modes() if in_a_mode else NOTHING:
            leaves: Sequence[Tensor]
            # A unit of frozen leaves alone needs no node: no gradients will come
            if tracked and unit.content.trained:
                leaves = Enter.apply(around.anchor, self)  # type: ignore[no-untyped-call]
            else:
                leaves = around.begin_use(unit, tracked)
        around.drop_leaves(unit)
        unit.leaves, unit.tracked, unit.left = leaves, tracked, set()
        unit.storages = [*map(storage_id, leaves)]
        return leaves

    def watch(self) -> AbstractContextManager[None]:
        return self.around.watch(self.unit)


class TableEntrance:
    """How a table's lazy parameter is looked up in forward: each lookup is an exchange."""

    __slots__ = ("around", "unit")

    def __init__(self, around: Pass, unit: UnitInPass):
        self.around, self.unit = around, unit

    @property
    def path(self) -> str:
        return self.unit.name

    def find(self, ids: Tensor, padding: int | None) -> Found:
        around, unit, flats = self.around, self.unit, self.unit.flats
        assert isinstance(flats, TableFlats)
        around.check_use(unit)
        asked, places = flats.ask(ids)
        tracked = around.anchor is not None and torch.is_grad_enabled()
        if tracked and unit.content.trained:
            take, x = around.rows_taken_by(unit), around.anchor
        else:
            take, x = None, flats.rows
        rows = around.exchange(Lookup(flats, asked, take, around.scaled_rows), x)
        place = None if padding is None else flats.reading.number_of(padding, asked)
        return Found(rows, places, place)


class Enter(torch.autograd.Function):
    """Forward: a unit's whole leaves. Backward: their gradients, to the pass; nothing goes back to
    autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entrance: UnitEntrance) -> tuple[Tensor, ...]:
        unit = entrance.unit
        leaves = entrance.around.begin_use(unit, tracked=True)
        ctx.around, ctx.use = entrance.around, unit.use  # made by `begin_use`, just now
        # None for leaves without a gradient: zeros of whole leaves would take memory
        ctx.set_materialize_grads(False)
        # Else the engine would compute gradients that nobody takes
        ctx.mark_non_differentiable(*map(leaves.__getitem__, unit.content.frozen))
        return leaves

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.around.on_backward(ctx.use, grads)
        return None, None  # the anchor's gradient is of no use


class Pass:
    """One forward and backward of a loss on lazy parameters.

    Args:
        layout: how the tree is cut.
        flats: of each unit.
        reduction: takes the gradients; None when there will be none.
        device: of the leaves.
        order: in which the pass before gathered units; None: it is not known.
        overlap: when gathers start, and reductions are waited for; None: the device's own choice.
        keeps: keep gathered flats from forward to backward (`reshard_after_forward=False`), and for
            the next pass, which is given the same.
        last: whether no other pass will give gradients to the same reduction.
        look: whether the values of flats are compared too, to see that the loss changes none.
        places: of tensors that autograd saves for backward, other than params, by the unit whose
            forward runs; None: memory.
    """

    def __init__(
        self,
        layout: Layout,
        flats: Sequence[UnitFlats],
        reduction: GradientReduction | None,
        *,
        device: torch.device,
        order: PrefetchOrder | None = None,
        overlap: Overlap | None = None,
        keeps: bool = False,
        last: bool = True,
        look: bool = False,
        places: ByUnit | None = None,
    ):
        self.entered = False  # whether gradients can flow to any trained leaf
        self.anchor: Any = None  # 0-d Tensor: makes autograd run the units' nodes
        if reduction is not None:
            self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._layout, self._device = layout, device
        self._stream = current_stream(device)  # see Note [one stream]
        self._reduction: Any = reduction
        self.overlap = Overlap.by_default(device) if overlap is None else overlap
        self._last, self._look, self._places = last, look, places
        self.saved_there = SavedThere()
        self._resident: set[int] = set()  # storages of params that stay whole
        self._keeps = keeps and reduction is not None
        self._units = []
        for index, unit in enumerate(layout.units):
            self._units.append(UnitInPass(index, unit, layout.contents[index], flats[index]))
        order = PrefetchOrder() if order is None else order
        # Flats that stayed were gathered in that order: here they would be gathered once more
        stayed = any(flat.transient and flat.here is not None for flat in flats)
        by_name = {unit.name: unit.flats for unit in self._units}
        self.following = Following(() if stayed else order.units, self.overlap.distance, by_name)
        self._gathers = any(unit.flats.moves for unit in self._units)
        follows = self._gathers or (reduction is not None and reduction.follows_uses(last))
        # None where the group can't ask
        self.uses: SameUses | None = order.compare(flats, of_units=follows)
        # Those of units where collectives follow from them
        self._words = self.uses.words if self.uses is not None and follows else None
        for here in self._units:
            if here.flats.here is not None:  # resident, or stayed from the pass before
                here.untouched = Untouched(here.flats.here, look=look)
                self._resident.update(map(storage_id, here.flats.here))
        # By number of storage: (unit, k) of the gathered flat in it
        self._gathered: dict[int, tuple[UnitInPass, int]] = {}
        self._open: list[Use] = []  # uses that backward has not come to, in order
        # Those that it has yet to ask for leaves, the first to ask last: each has the number after
        # that of the newest node that saved some
        self._to_ask: dict[Use, Number] = {}
        # Units whose whole gradients are still to be reduced, in the layout's order
        reduces_rest = last and reduction is not None
        self._waiting = [u for u in self._units if reduces_rest and not u.content.is_table]
        # Per unit with a direct use, the gradients (None so far) of its leaves; in the order of the
        # uses, which is the same on every rank. See Note [direct uses].
        self._direct: dict[int, list[Tensor | None]] = {}
        self._roots: list[Tensor] = []  # of exchanges, 0-d each; see Note [roots] in `exchange.py`
        self.num_owed = 0  # exchanges with gradients to which backward has yet to come
        self.mixes = False  # whether one of them brings gradients of other ranks' losses
        self._loss_returned = False  # from then on, a backward is the pass's own
        self.reached = False  # whether its backward has come to a trained leaf
        self.trial: TwoSeeds | None = None  # of its backward; None: nothing runs aside
        self.over = False  # whether it has ended, so that its lazy parameters are of no use
        self._scale: Any = None  # a Scale, once the loss has returned
        self._compared: Use | None = None  # whose leaves other hooks were given, too
        self._in_use: Use | None = None  # the one that backward is at,
        self._asks = 0  # the number of its saved leaves that backward has asked for,
        self._to_come = 0  # and the elements of those that it has yet to ask for

    def lazy_params(self) -> Any:
        """The tree the loss sees."""
        layout, entrances = self._layout, list[Any]()
        for unit in self._units:
            made = (TableEntrance if unit.content.is_table else UnitEntrance)(self, unit)
            entrances.append(made)
        lazy: list[LazyParam] = []
        for leaf, (u, k) in zip(layout.leaves, layout.in_units, strict=True):
            kind = LazyTable if leaf.cut.by_rows else LazyParam
            form = leaf.shape, leaf.dtype, leaf.dtypes
            lazy.append(make_lazy_param(entrances[u], k, *form, self._device, kind))
        if self.anchor is None:
            return layout.treedef.unflatten(lazy)
        handed = handed_out(lazy, layout.trained, [self.anchor], self.on_direct_grads)
        return layout.treedef.unflatten(handed)

    # Forward

    def begin_use(self, unit: UnitInPass, tracked: bool) -> tuple[Tensor, ...]:
        """The leaves, whole, bucket by bucket, for the loss alone."""
        # A unit entered in backward: a checkpoint runs its forward once more
        backward = backward_number() != NO_BACKWARD
        # A backward of the loss's own gathers nothing where flats stay
        if not self._loss_returned and not (backward and self._keeps):
            self._say_use(unit, tracked)
        if backward:
            # It runs again for backward: its flats stay until the gradients have come
            unit.use = Use(unit.index, None)
            unit.recomputing = self._is_at_last_use_of(unit)
        elif tracked:
            self._open_use(unit)
        else:
            self._keep_open_for_backward(unit)
            if unit.use is None:
                # No gradients, and no use before: saved leaves still need a use to name
                unit.use = Use(unit.index, None)
        if unit.flats.here is None:
            self._unshard(unit)
        # In backward `on_first_use` and `on_backward` choose the moment
        if not backward:
            for flats in self.following.ahead:
                flats.start()
        # New tensors each time: a node's outputs become part of its graph
        return (*map(Tensor.detach, unit.flats.leaves()),)

    def _open_use(self, unit: UnitInPass) -> None:
        """Note a use whose gradients backward will bring."""
        self.entered |= bool(unit.content.trained)
        # Order doesn't matter: uses are counted, so that a unit is reduced after its last
        if self._reduction.in_layout_order:
            unit.use = Use(unit.index, ())
            unit.num_open += bool(unit.content.trained)
            return
        # The next node is the unit's own `Enter`; see Note [where backward is]
        unit.use = Use(unit.index, (next_node_number(), len(self._open)))
        unit.num_open += 1
        self._open.append(unit.use)
        if unit.flats.transient and _others_hooks() is not None:
            unit.use.saved += 1  # backward may run the unit again

    def _keep_open_for_backward(self, unit: UnitInPass) -> None:
        """A unit is used without gradients. By a custom function it may be run again in backward,
        and get gradients by a backward in there: its whole flats then wait for the pass's end."""
        in_layout_order = self._reduction is not None and self._reduction.in_layout_order
        if in_layout_order and unit.content.trained and in_custom_function():
            unit.num_open += 1

    def open_direct_use(self, unit: UnitInPass) -> None:
        """A custom function reads the unit's leaves, and will give gradients to lazy parameters."""
        if unit.index not in self._direct and unit.content.trained:
            self._direct[unit.index] = [None] * len(unit.content.leaves)
            if self._words is not None:
                self._words.append(f"{unit.name}, given to a custom function")
            self.entered = True
            unit.num_open += 1

    def exchange(self, exchange: Exchange, x: Tensor) -> Tensor:
        """The result of an exchange that the loss starts, differentiable where `x` is.

        Collectives: those of the exchange, now and in backward. Ranks compare its word before.

        Args:
            exchange: made for this call.
            x: this rank's part. The anchor, for an exchange of the pass's own params, whose
                gradients `exchange.back` takes.

        Raises:
            GroupError: another rank's loss does something else here.
            StructureError: the call is inside of a transform of torch.func, or of a region that
                a checkpoint runs again and whose first run is not known.
        """
        self.refuse_aside()
        if self.over:
            raise _outlived(exchange.word)
        if transforms_active():
            raise transformed(exchange.word)
        x = x.whole() if type(x) is LazyParam else x
        tracked = torch.is_grad_enabled() and x.requires_grad
        # Ranks that differ in it would differ in backward's collectives
        word = f"{exchange.word}, with gradients" if tracked else exchange.word
        region = region_of(_others_hooks())
        if self._loss_returned or backward_number() != NO_BACKWARD:
            known = None if region is None else region.again(word)
            if known is None:
                raise ran_again(exchange.word)
            return ReceivedAgain.apply(x, [known]) if tracked else known  # type: ignore[no-untyped-call]
        if self.uses is not None:
            self.uses.words.append(word)
            self.uses.check()
        result: Tensor
        if tracked:
            result, root = Exchanged.apply(x, exchange, self)  # type: ignore[no-untyped-call]
            self._roots.append(root)
            self.num_owed += 1
            self.entered |= x is self.anchor
            self.mixes |= x is not self.anchor
        else:
            result = exchange.there(x.detach())
        if region is not None:
            region.keep(word, result)
        return result

    def take_roots(self) -> list[Tensor]:
        """The roots of the exchanges, to be differentiated with the loss. They lead to the pass, a
        cycle that nobody collects."""
        roots, self._roots = self._roots, []
        return roots

    def rows_taken_by(self, unit: UnitInPass) -> Callable[[Tensor, Tensor], None]:
        """Takes gradients of a table's rows here, and the rows' numbers."""
        (b,) = unit.content.trained
        return lambda rows, grads: self._reduction.add_rows(b, rows, grads)

    def scaled_rows(self, grads: Tensor) -> Tensor:
        """Gradients (k, columns) of this rank's loss, as they are reduced."""
        scaled: Tensor = self._scale(grads, is_own=False)
        return scaled

    def watch(self, unit: UnitInPass) -> AbstractContextManager[None]:
        """Around a use: saved tensors that lie in gathered flats are remembered, not kept. Others
        go to the hooks of a user around the unit, where there are some; else to their place."""
        remembers = unit.flats.transient and not self._keeps
        # Those around the loss know one place only
        by_unit = self._places is not None and not self._places.is_one
        # A transform's tensors have no storage to go by
        if self.anchor is None or not (remembers or by_unit) or transforms_active():
            return NOTHING
        return self._hooks(unit.path)

    def around_loss(self) -> AbstractContextManager[None]:
        """Around the loss: saved tensors go to their place, where they have one."""
        return NOTHING if self._places is None or self.anchor is None else self._hooks("")

    def _hooks(self, path: str) -> AbstractContextManager[None]:
        """`path`: of the unit, or the root's."""
        theirs = _others_hooks()
        # A checkpoint's count what is saved, in forward and when they run it again
        if theirs is not None and recompute(theirs):
            return NOTHING
        own = PassHooks(self, None if self._places is None else self._places.of(path), theirs)
        return saved_tensors_hooks(own.remember, own.recall)

    def compares(self, use: Use) -> bool:
        """Whether other hooks are given the leaves of a use, too, to see what they make of them."""
        if self._compared is None and self._look:
            self._compared = use
        return self._compared is use

    def name_of(self, use: Use) -> str:
        """The name of a use's unit."""
        return self._units[use.unit].name

    def moves(self, tensor: Tensor) -> bool:
        """Whether a saved tensor may lie in a place."""
        # Without memory row by row
        if transforms_active() or tensor.layout is not torch.strided or is_flagged(tensor):
            return False
        # Params are in memory anyway
        is_param = storage_id(tensor) in self._resident or storage_id(tensor) in self._gathered
        return not is_param and tensor.device == self._device

    def saved_leaf_of(self, tensor: Tensor) -> SavedLeaf | None:
        """Where a tensor lies in a gathered flat; None: it lies in none."""
        # Flats stay; or a transform's tensors, and sparse ones, have no storage to go by
        if self._keeps or transforms_active() or tensor.layout is not torch.strided:
            return None
        # By storage, so that views of leaves, transposed ones say, are found too
        owner = self._gathered.get(storage_id(tensor))
        if owner is None:
            return None
        unit, k = owner
        assert unit.use is not None
        unit.use.saved += tensor.numel()  # elements; of an expanded view more than lie there
        if unit.use.number:
            self._to_ask.pop(unit.use, None)
            self._to_ask[unit.use] = (next_node_number(),)
        offset: Any = tensor.storage_offset()
        lazy = tensor.is_conj(), tensor.is_neg()
        return SavedLeaf(unit.use, k, tensor.dtype, offset, tensor.size(), tensor.stride(), *lazy)

    def on_leave(self, unit: UnitInPass) -> None:
        """The calls of the unit's modules have returned: free its flats, unless they are wanted."""
        self.drop_leaves(unit)
        if not unit.flats.transient or self._keeps or unit.recomputing:
            return
        self._say(f"{unit.name}, left")
        # Forward's last unit is backward's first: freed, it would be gathered at once
        if unit.name == self.following.expected:
            self.following.add(unit.name)  # stays: backward begins with it
        else:
            self._reshard(unit)

    def loss_ended(self, scale: Scale) -> None:
        """The loss has returned, and packed gradients are to be scaled like this."""
        # The loss is over: whatever it wrote to resident flats shows in their versions
        self._check_resident()
        if self._words is not None:
            self._say_end(self._words)
        if self.uses is not None:
            self.uses.check_end()
        self._loss_returned, self._scale, self._in_use = True, scale, None

    # Backward

    def on_first_use(self, use: Use, ask: SavedLeaf) -> Tensor:
        """Backward uses leaves of a unit, for the first time or once more: a view of them.

        The first ask gathers the unit, and says where backward is. An early one, by the choice of
        `Overlap`, starts the gathers ahead and ends earlier reductions.
        """
        # The first ask of this use: backward has moved on
        if use is not self._in_use:
            self._in_use, self._asks, self._to_come = use, 0, use.saved
            # A recomputation has no place of its own; nor has a backward inside of the loss
            if use.number is not None and self._loss_returned:
                # Only where others began or ask after it, as few do, is there somebody to pass by
                if self._open[-1:] != [use] or next(reversed(self._to_ask), use) is not use:
                    self._pass_by_until_running_node()
                self._to_ask.pop(use, None)
            self._say(f"{self._units[use.unit].name}, in a backward of the loss's own")

        # Gathered by this ask, by one before, or on its way since an earlier unit
        unit = self._units[use.unit]
        self.check_use(unit)
        flat = (unit.flats.here or self._unshard(unit))[ask.k]

        self._asks += 1
        if 8 * self._to_come > use.saved:  # most is to come; see Note [peak of backward]
            if self._asks == self.overlap.settle_at:
                self._reduction.settle()
            if self._asks == self.overlap.gather_at:
                for flats in self.following.ahead:
                    flats.start()
        self._to_come -= ask.size.numel()

        # A leaf may have been saved through a view in another dtype
        flat = flat if flat.dtype is ask.dtype else flat.view(ask.dtype)
        leaf = flat.as_strided(ask.size, ask.stride, ask.offset)
        leaf = leaf.conj() if ask.conj else leaf
        return neg_view(leaf) if ask.neg else leaf

    def on_backward(self, use: Use, grads: Grads) -> None:
        """Backward has come to the end of a use: its leaves' gradients, None for those without.

        The flats go before gradients are packed; packed gradients are reduced, or add up to those
        of other uses; the gathers ahead are on their way at the latest now.
        """
        unit = self._units[use.unit]
        self.refuse_aside()
        if not self._loss_returned:
            # A backward of the loss's own, `.backward()` say: nobody will read its gradients of
            # params. The use stays open: the pass's own backward comes to it, or passes it by.
            if not unit.depth:
                self._reshard(unit)
            return
        self.reached = True
        if use.number is not None:
            self._pass_by(use.number)
        # Those after it were passed by just now, so the last open use is this one
        if self._open and self._open[-1] is use:
            self._close_last()
        else:  # a recomputation, or a use whose order does not matter
            if self._reduction.in_layout_order and use.number is not None:
                unit.num_open -= 1
            self.drop_leaves(unit)
            self._reshard(unit)

        self._reduce(unit, grads)
        self._in_use = None
        # At the latest now, so that the next unit's ask doesn't begin with a wait
        for flats in self.following.ahead:
            flats.start()

    def on_exchange(self, exchange: Exchange, grad: Tensor) -> Tensor | None:
        """Backward has come to an exchange, on every rank. Returns the gradient of its argument."""
        self.refuse_aside()
        if not self._loss_returned:
            raise differentiated_inside(exchange.word)
        self.reached = True
        self._pass_by_until_running_node()
        # Another rank's backward may have gathered the unit that the exchange is in, and more
        if self._open and self._open[-1].saved:
            unit = self._units[self._open[-1].unit]
            if unit.flats.here is None:
                self._unshard(unit)
        for flats in self.following.ahead:
            flats.start()
        self.num_owed -= 1
        return exchange.back(grad)

    def on_direct_grads(self, grads: Grads) -> Grads:
        """Backward has come to its end, with gradients (those of all leaves, in the layout's order)
        of lazy parameters that custom functions were given. They are reduced at the pass's end."""
        self.refuse_aside()
        if not self._loss_returned:
            return (None,)  # a backward of the loss's own
        rows = zip(grads, self._layout.leaves, self._layout.in_units, strict=True)
        for grad, leaf, (unit, number) in rows:
            if grad is None:
                continue
            if unit not in self._direct:
                raise _unseen(leaf.path)
            self._direct[unit][number] = grad
            self.reached = True
        return (None,)  # nothing for the anchor

    def refuse_aside(self) -> None:
        """End a run aside that has come to a unit: see Note [aside] in `two_seeds.py`."""
        if self.trial is not None and self.trial.is_aside:
            raise CantBeTried

    def _pass_by(self, number: Number) -> None:
        """Backward is at that use: open ones after it get no gradients any more."""
        while self._open and self._open[-1].number > number:
            unit = self._close_last()
            self._reduce(unit, None)
        self._pass_by_asks(number)

    def _pass_by_asks(self, number: Number) -> None:
        """Backward is at that use: other ranks have gathered what newer nodes have saved, of uses
        around it, too."""
        while self._to_ask and next(reversed(self._to_ask.values())) > number:
            use, _ = self._to_ask.popitem()
            unit = self._units[use.unit]
            if unit.flats.here is None:
                self._unshard(unit)

    def pass_by_newer(self) -> None:
        """The loss, if its backward runs, calls a unit again: newer uses get no gradients."""
        if self._loss_returned and self._open:
            self._pass_by_until_running_node()

    def _is_at_last_use_of(self, unit: UnitInPass) -> bool:
        """Whether backward, which runs the unit again, has come to the unit's own last open use."""
        if not self._loss_returned or not self._pass_by_until_running_node():
            return False
        return bool(self._open) and self._open[-1].unit == unit.index

    def _pass_by_until_running_node(self) -> bool:
        """Backward is at the node that runs: open uses after it get no gradients any more. False
        if none runs."""
        node = running_node_number()
        if node is not None:
            # A use that began right after it has the number (node + 1, k), greater than (node + 1,)
            self._pass_by((node + 1,))
        return node is not None

    def _close_last(self) -> UnitInPass:
        """Backward has come to the end of the last open use, or passed it by. Returns its unit."""
        use = self._open.pop()
        self._pass_by_asks(use.number)
        unit = self._units[use.unit]
        unit.num_open -= 1
        # A use that saved nothing is not gathered in backward, on any rank
        if use.saved and unit.flats.here is None:
            self._unshard(unit)  # passed by here, but other ranks have gathered it
        self.drop_leaves(unit)
        # Flats kept from forward stay until the unit's last open use
        if not unit.num_open or not self._keeps:
            self._reshard(unit)
        for flats in self.following.ahead:
            flats.start()
        return unit

    def _reduce(self, unit: UnitInPass, grads: Grads | None) -> None:
        """Pack a use's gradients into whole flats, and reduce them or add them up. None: zeros."""
        reduction = self._reduction
        if unit.is_reduced:
            raise _too_late(unit.name)
        # Before packing, so that the new flat takes the room that the oldest leaves
        if not reduction.in_layout_order:
            reduction.make_room(self.overlap.num_under_way, unit.content.trained)
        # Bucket by bucket, in the layout's order: every rank starts the same collectives
        for b, which in zip(unit.content.trained, unit.content.slices, strict=True):
            bucket = self._layout.buckets[b]
            own: Grads = [None] * len(bucket.leaves) if grads is None else grads[which]
            at_once = b in reduction.every_use  # freed as soon as it is reduced: levels 2 and 3
            # A reduce-scatter only reads its flat, so that may be autograd's own
            if at_once and is_flat(own[0], bucket, bucket.summed_in):
                # (numel,), where one leaf fills the bucket
                flat = self._scale(own[0].detach().view(-1), is_own=False)
            else:
                flat = pack(own, bucket, device=self._device, dtype=bucket.summed_in)
                flat = self._scale(flat, is_own=True)
            if at_once:
                reduction.start(b, flat, is_last=self._last and not unit.num_open)
            else:
                reduction.add(b, flat)
        # Flats that have added up are due after the unit's last use in the last pass
        # In layout order: from the end, as far as units have no open use
        if reduction.in_layout_order:
            while self._waiting and not self._waiting[-1].num_open and not self.num_owed:
                self._reduce_whole(self._waiting.pop())
        elif reduction.whole and self._last and not unit.num_open:
            self._reduce_whole(unit)

    def _reduce_whole(self, unit: UnitInPass) -> None:
        """Start the reductions of a unit's gradients that have added up, whole."""
        reduction = self._reduction
        unit.is_reduced = reduction.in_layout_order  # each unit once
        ready = [b for b in unit.content.trained if b in reduction.whole]
        if not ready and reduction.in_layout_order:  # other ranks may have some
            for b in unit.content.trained:
                bucket = self._layout.buckets[b]
                none, dtype = [None] * len(bucket.leaves), bucket.summed_in
                zeros = pack(none, bucket, device=self._device, dtype=dtype)
                reduction.add(b, self._scale(zeros, is_own=True))  # (numel,)
            ready = [*unit.content.trained]
        if ready:
            reduction.make_room(self.overlap.num_under_way, ready)
        for b in ready:
            reduction.start(b, reduction.whole.pop(b), is_last=True)

    def finish(self) -> None:
        """The pass, its backward included, is over."""
        if self._reduction is None and self.uses is not None:
            self.uses.check_end()
        if self._reduction is not None:
            self._pass_by(())  # () is before all uses: those still open get zeros
            for index, grads in self._direct.items():
                unit = self._units[index]
                unit.num_open -= 1
                self._reduce(unit, grads)
            while self._waiting:  # units that the last pass has not entered
                self._reduce_whole(self._waiting.pop())
        # A loss that failed, or an evaluation, may have left units entered
        for unit in self._units:
            self.drop_leaves(unit)
            self._reshard(unit)
        self._check_resident()
        self._in_use, self.over = None, True

    def check_use(self, unit: UnitInPass) -> None:
        """Raise if a unit is used after the pass, or on another stream; see Note [one stream]."""
        # Its flats hold other values by now, and other ranks no longer gather with this one
        if self.over:
            raise _outlived(unit.name)
        if self._stream is not None and current_stream(self._device) != self._stream:
            raise _on_another_stream(unit.name, self._stream, current_stream(self._device))

    def drop_leaves(self, unit: UnitInPass) -> None:
        """The leaves of a use go. The loss must have left them as they were, without hooks."""
        if unit.leaves is None:
            return
        # At once: leaves lead to the node that leads to the pass, a cycle that nobody collects
        leaves, unit.leaves = unit.leaves, None
        for k, (leaf, storage) in enumerate(zip(leaves, unit.storages, strict=True)):
            if storage_id(leaf) != storage:
                raise changed_in_place(self._path_of(unit, k))
            if hooks_of(leaf):
                raise _hooked(self._path_of(unit, k))

    def _check_resident(self) -> None:
        """Raise if the loss has written to resident flats: every later step would use them."""
        for unit in self._units:
            if unit.untouched is not None and not unit.flats.transient:
                unit.untouched.check(unit.name)

    def _path_of(self, unit: UnitInPass, k: int) -> str:
        """The path of a unit's k-th leaf, in the unit's own order."""
        return self._layout.leaves[unit.content.leaves[k]].path

    def abandon(self) -> None:
        """The loss or its backward has failed. Leaves lead to a node, which leads to the pass: a
        cycle through autograd, which Python's collector doesn't see."""
        for unit in self._units:
            unit.leaves = None
        self._roots.clear()
        self.over = True

    # Words for the other ranks: see Note [same uses] in `same_uses.py`

    def _say(self, word: str) -> None:
        """Note a moment of the loss, if gathers follow from it."""
        if self.uses is not None and self._gathers and not self._loss_returned:
            self.uses.words.append(word)

    def _say_use(self, unit: UnitInPass, tracked: bool) -> None:
        """Note a use that begins, if a collective follows from it."""
        # A unit that is only cast on use has a place in the order of gathers, too
        gathers = self._gathers and unit.flats.transient
        reduces = tracked and bool(unit.content.trained)
        if self._words is not None and (gathers or reduces):
            self._words.append(unit.name if tracked else f"{unit.name}, without gradients")

    def _say_end(self, words: list[str]) -> None:
        """Note, at the end of the loss, the rest that backward's collectives follow from."""
        for use in self._open:
            unit = self._units[use.unit]
            if unit.flats.moves and not use.saved and not self._keeps:
                words.append(f"{unit.name}, used with nothing saved")
        # Sums of earlier micro-batches, of units that this one has not used
        for unit in self._waiting:
            if not unit.num_open and self._reduction.whole.keys() & {*unit.content.trained}:
                words.append(f"{unit.name}, used in an earlier micro-batch only")

    # Gathers

    def _unshard(self, unit: UnitInPass) -> list[Tensor]:
        """The unit's flats, (num_pieces * piece,) each, gathered now or on their way already."""
        if self.uses is not None and self._gathers and not self._loss_returned:
            self.uses.check()
        # The order of gathers, which the next pass follows
        self.following.add(unit.name)
        flats = unit.flats.unshard()
        if unit.flats.transient and self._look:
            unit.untouched = Untouched(flats, look=True)
        for k, (flat, bucket) in enumerate(zip(flats, unit.content.buckets, strict=True)):
            # Resident flats of a mixed unit stay; an empty flat may share its address with others
            if bucket.is_made_on_use and flat.numel():
                self._gathered[storage_id(flat)] = unit, k
            elif not bucket.is_made_on_use:
                self._resident.add(storage_id(flat))
        return flats

    def _reshard(self, unit: UnitInPass) -> None:
        """Free the unit's gathered flats, unless the next pass keeps them. A loss must not have
        written to them: that would be lost."""
        flats, stays = unit.flats, self._keeps and not self._last
        # One that stays may be on its way
        if not flats.transient or (stays and flats.here is None):
            return
        # The backend still writes to it: wait, then let go
        if flats.under_way is not None:
            flats.unshard()
        if flats.here is None:
            return
        # Another storage may soon be known by the same number
        for flat in flats.here:
            self._gathered.pop(storage_id(flat), None)
        # Tensors of inference mode have no version, and are not compared
        if [*map(version_of, filterfalse(Tensor.is_inference, flats.here))] != flats.versions:
            raise changed_in_place(unit=unit.name)
        if unit.untouched is not None:
            unit.untouched.check(unit.name)
        if not stays:
            unit.untouched, flats.here = None, None


def _changed(saved: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {tuple(saved.shape)} is at version {version_of(saved)}; "
        f"expected version {version} instead. Remedy: don't change in place what the loss still "
        "needs; torch.autograd.set_detect_anomaly(True) finds it in the unsharded step"
    )


def _hooked(path: str) -> StructureError:
    return StructureError(
        "a hook was put on a sharded parameter: it would see the gradient of this rank's "
        "batch, where an unsharded step's sees that of the whole batch",
        path=path,
        remedy="change gradients in the optimizer: optim.chain(your_transform, ...)",
    )


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread's work for the device is queued; None without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _on_another_stream(unit: str, expected: Any, got: Any) -> StructureError:
    return StructureError(
        "a unit of sharded params was used on another stream than the step's: its leaves are "
        "gathered and freed in the order of one stream",
        path=unit,
        expected=expected,
        got=got,
        remedy="run all units on the stream on which the step is called, `with "
        "torch.cuda.stream(...)` around that call if need be; use others for work without "
        "params",
    )


def _outlived(unit: str) -> StructureError:
    return StructureError(
        "a sharded parameter was used after the loss that it was given to: it keeps no values",
        path=unit,
        expected="a use inside of that call of the loss",
        remedy="keep a copy of the whole leaf, fz.unshard(param).detach().clone(); return a "
        "number to log by fz.Aux(metrics=...); read state.params between steps",
    )


def _unseen(path: str) -> StructureError:
    return StructureError(
        "a gradient came to a sharded parameter that no operator has read: a custom "
        "autograd.Function was given it, and its forward did not look at it",
        path=path,
        remedy="give the function a whole leaf, fz.unshard(params[...])",
    )


def _too_late(unit: str) -> StructureError:
    return StructureError(
        "a unit got gradients after they were reduced: a custom autograd.Function ran it in "
        "its backward, and had not in its forward",
        path=unit,
        expected="each unit that backward runs again, run in the function's forward",
        remedy="run it there, under torch.no_grad(), or use torch.utils.checkpoint with "
        "use_reentrant=False",
    )


def _changed_by_hooks(unit: str, hooks: Hooks) -> StructureError:
    name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
    return StructureError(
        "hooks on saved tensors bring back other values than they were given, and an unsharded "
        "step gives them its params, too: gradients would differ",
        path=unit,
        expected="the same values, to the bit",
        got=f"others, of {name}",
        remedy="let the hooks return params as they are, or put them where no param is saved; "
        "or reshard_after_forward=False, which gives the hooks whole params",
    )


def _others_hooks() -> Hooks | None:
    """Someone else's saved-tensor hooks, if they are the innermost ones, or those that the pass's
    own are composed with."""
    top = innermost_saved_tensors_hooks()
    owner = None if top is None else getattr(top[0], "__self__", None)
    return owner.theirs if isinstance(owner, PassHooks) else top
