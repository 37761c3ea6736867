"""The optimizer's update on one rank's pieces, prepared once per layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from ..groups import labelled
from ..layout.extent import Rows
from ..layout.home import Home
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree
from ..optim.base import Needs, Transform, split_fused
from ..optim.state_checks import check_opt_state
from ..profiling import ranged
from ..sharded_optim.across import Sharded
from ..sharded_optim.ferry import Ferry
from ..sharded_optim.pointwise import UpdateFlats, device_of
from ..sharded_optim.sharded_state import ShardedOptState
from ..sharded_optim.state_plan import StatePlan, plan_state, state_like
from ..tree import same_structure
from .options import Options


class PreparedUpdate:
    """The optimizer's update on pieces, and all that follows from a layout.

    Args:
        optimizer: whose update it is.
        fuse: whether a fused kernel may add the updates to the params itself.

    Attributes:
        optimizer: as given.
        layout: how the params are cut.
        donates: whether all that an update is given may be written over.
        across: the answers to the optimizer's questions.
        plan: which leaves of the optimizer's state follow a param, and which have an owner.
        takes_rows: whether gradients of tables may be rows; not where all of the optimizer is a
            kernel or a pointwise function, of dense ones, nor where a NaN in one leaf may reach
            all others by a norm.
        update_fn: of the optimizer, for `run`.
    """

    def __init__(self, optimizer: Transform, layout: Layout, options: Options, *, fuse: bool):
        group = options.axes.optimizer
        self.layout, self.donates = layout, options.donate
        places = options.places.state
        self.ferry = Ferry(() if places is None else places.distinct)
        self._owned = UpdateFlats()
        self.across = Sharded(
            layout,
            labelled(group, "optimizer/update"),
            donate=options.donate,
            ferry=self.ferry,
            owned=self._owned,
        )
        self.plan: StatePlan = plan_state(optimizer.init_fn, layout, layout.trainable, group.size)
        self._like_state = state_like(self.plan, layout, options.axes.piece_number)
        # Positions in flatten order of the leaves that are cut with a param, and their shapes
        self._cut = [i for i, leaf in enumerate(self.plan.leaves) if leaf.is_cut]
        self._shapes = self._shapes_in(optree.tree_leaves(self._like_state))
        self.optimizer = optimizer
        # (the parts before it, its fused end), or None: not all of the end is one kernel
        self._split = split_fused(optimizer) if fuse else None
        plain = optimizer.plain
        is_of_all = self._split is not None or (plain is not None and not plain.keeps_zeros)
        self.takes_rows = optimizer.takes_rows and not is_of_all
        # Only rows of finite gradients: a factor that is no number makes NaNs of zeros, too
        self._needs_finite = _asks_statistics(optimizer)
        # Else kernels for some of the leaves may run, which write to params
        adds = fuse and options.donate
        self.update_fn = optimizer.update_and_add if adds else optimizer.update_fn

    def check_state(self, state: Any, rank: int, *, what: str = "state.opt_state") -> None:
        """Raise unless an optimizer's state, of this name, is one that this update can take."""
        leaves, treedef = optree.tree_flatten(state)
        # The usual case, asked of all leaves at once: a state may have many
        if treedef == self.plan.treedef and self._shapes_in(leaves) == self._shapes:
            return
        check_opt_state(self._like_state, state, rank, what=what)

    def _shapes_in(self, leaves: Sequence[Any]) -> list[Any]:
        """Of a state's leaves, the shapes of those that are cut with a param; None of what is no
        tensor."""
        return [getattr(leaves[i], "shape", None) for i in self._cut]

    def run_kernel(
        self,
        grads: ShardedTree,
        state: ShardedOptState,
        params: ShardedTree,
        *,
        donate: bool,
        look: bool,
    ) -> ShardedOptState:
        """The optimizer's next state, of params to which its kernel adds the updates, where it
        `fuses`."""
        assert self._split is not None
        # (piece,) each, views of the params' own, to which a kernel writes
        run = KernelRun(self.across, *self._split, _trained_flats(params), donate=donate)

        def update(given: Any, before: Any, own: Any, across: Sharded) -> tuple[Any, Any]:
            return given, run(given, before, own, grad_flats=_trained_flats(grads))

        return self.run(update, grads, state, params, look=look, over=donate)[1]

    def run(
        self,
        update: Callable[..., tuple[Any, Any]],
        grads: ShardedTree,
        state: ShardedOptState,
        params: ShardedTree,
        *,
        look: bool,
        over: bool,
    ) -> tuple[ShardedTree, ShardedOptState]:
        """The updates in pieces that are to be added, and the optimizer's next state, by an
        `update_fn` of it. Collectives: those that the optimizer asks for.

        The state is given as it lies; of the next one, some leaves lie beside the params, and
        others in their place already. With `look`, `placed` compares these to the bit.

        `over`: whether the state is used up, and what it makes may be written over its tensors in
        their place."""
        self.ferry.begin(look=look, over=over)
        given = grads.local_rows if self._takes_rows_of(grads) else grads.local_tree
        own, before = params.local_tree, state.as_it_lies
        if not self.optimizer.asks_for_state:
            before = self.ferry.beside(before, device_of(own))
        owned = self._owned
        owned.begin(grads.known_homes, params.known_homes, state.homes())
        try:
            with ranged("update"):
                new, after = update(given, before, own, self.across)
            same_structure(own, new, what="the optimizer's updates")
            same_structure(before, after, what="the optimizer's next state")
            homes = owned.state.among(optree.tree_leaves(after))
            # Leaves that stay as they are: their flats are those of a state that stays valid
            if not over:
                still_valid = set(map(id, state.homes()))
                homes = [home for home in homes if id(home) not in still_valid]
            # Those given, where a kernel has added them already
            flats = grads.known_homes if new is given else self._homes_of(new)
            updates = ShardedTree.of_local(new, grads.holding, flats)
        finally:
            # Else they would be alive until the next one
            owned.begin()
        return updates, ShardedOptState(after, state.holding, homes)

    def _takes_rows_of(self, grads: ShardedTree) -> bool:
        if not self.takes_rows or not self._needs_finite:
            return self.takes_rows
        leaves = optree.tree_leaves(grads.local_rows)
        return all(leaf.is_finite for leaf in leaves if isinstance(leaf, Rows))

    def _homes_of(self, updates: Any) -> list[Home | None]:
        """By bucket, the flat that updates are cut from; None: they are loose."""
        leaves = self.layout.treedef.flatten_up_to(updates)
        own = [[leaves[n] for n in bucket.leaves] for bucket in self.layout.buckets]
        return [*map(self._owned.updates.home_of, own)]

    def fuses(self, params: ShardedTree) -> bool:
        """Whether one kernel adds all updates to these pieces itself."""
        if self._split is None:
            return False
        _, fused = self._split
        return self.across.fuses(fused, _trained_flats(params))


@dataclass(frozen=True)
class KernelRun:
    """A run of an optimizer that is a kernel, or a chain that ends in one: see `split_fused`.

    Attributes:
        head: the chain's other parts, if there are any.
        end: the kernel.
        flats: (piece,) of the params, to which the kernel writes.
        donate: whether it writes over its state.
    """

    across: Sharded
    head: Transform | None
    end: Transform
    flats: list[Tensor]
    donate: bool = True

    def __call__(self, grads: Any, state: Any, params: Any, grad_flats: list[Tensor]) -> Any:
        """The next state, from trees of pieces; `grad_flats`: those that the gradients lie in."""
        # The kernel takes the gradients as they come
        if self.head is None:
            return self._run(grad_flats, state)
        # A chain's state: one entry per part, the kernel's last
        *before, last = state
        updates, states = self.head.update(grads, tuple(before), params, self.across)
        return (*states, self._run(self.across.flats(updates), last))

    def _run(self, updates: list[Tensor], state: Any) -> Any:
        return self.across.fused(self.end, updates, state, self.flats, donate=self.donate)


def _trained_flats(pieces: ShardedTree) -> list[Tensor]:
    """The flats (piece,) of the trained buckets."""
    return [flat for flat in pieces.flats() if flat is not None]


def _asks_statistics(optimizer: Transform) -> bool:
    """Whether a part of it asks for norms or other sums."""
    return optimizer.needs is Needs.STATISTICS or any(map(_asks_statistics, optimizer.parts))
