"""The optimizer's update on one rank's pieces, prepared once per layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import optree
from torch import Tensor

from ..layout.extent import Rows
from ..layout.home import Home
from ..layout.layout import Layout
from ..layout.sharded_tree import Holding, ShardedTree, own_pieces, pieces_of
from ..optim.base import Needs, Transform, last_kernel
from ..optim.state_checks import check_opt_state, note_other_dtype
from ..profiling import ranged
from ..sharded_optim.across import Sharded
from ..sharded_optim.pointwise import Donate
from ..sharded_optim.sharded_state import ShardedOptState
from ..sharded_optim.state_plan import StatePlan, plan_state, state_like, state_on_meta
from ..tree import are_tensors, same_structure
from .options import Options


class PreparedUpdate:
    """The optimizer's update on pieces, and all that follows from a layout.

    Args:
        optimizer: whose update it is.
        layout: how the params are cut.
        options: those of `shard`.
        across: the answers to questions about leaves that are cut so.
        brought: of states that lie in their place; see `StateHolding`.

    Attributes:
        optimizer, layout, across: as given.
        plan: which leaves of the optimizer's state follow a param, and which have an owner.
    """

    def __init__(
        self,
        optimizer: Transform,
        layout: Layout,
        options: Options,
        across: Sharded,
        brought: Callable[[Any], Any] | None,
    ):
        self.layout, self.across, self._brought = layout, across, brought
        num_ranks = options.axes.optimizer.size
        self._planned = optimizer.init_fn, layout, layout.trainable, num_ranks
        self.plan: StatePlan = plan_state(*self._planned)
        self._like_state = state_like(self.plan, layout, options.axes.piece_number)
        # Positions in flatten order of the leaves that are cut with a param, and their shapes
        self._cut = [i for i, leaf in enumerate(self.plan.leaves) if leaf.is_cut]
        like = optree.tree_leaves(self._like_state)
        self._shapes = [like[i].shape for i in self._cut]
        self.optimizer = optimizer
        self._kernel = last_kernel(optimizer)  # None: no kernel adds all updates
        # Whether all of it is a pointwise function of dense gradients
        plain = optimizer.plain
        self._is_dense = plain is not None and not plain.keeps_zeros
        # Only rows of finite gradients: a factor that is no number makes NaNs of zeros, too
        self._needs_finite = _asks_statistics(optimizer)

    def check_state(self, state: ShardedOptState, rank: int, *, what: str) -> None:
        """Raise unless an optimizer's state, of this name, is one that this update can take."""
        treedef, leaves, _ = state.local
        # The usual case, asked of all leaves at once: a state may have many
        if treedef == self.plan.treedef:
            own = [*map(leaves.__getitem__, self._cut)]
            if are_tensors(own) and [*map(attrgetter("shape"), own)] == self._shapes:
                return
        check_opt_state(self._like_state, state.as_it_lies, rank, what=what)

    def run(
        self,
        grads: ShardedTree,
        state: ShardedOptState,
        flats: Sequence[Tensor],
        holding: Holding,
        *,
        by_kernel: bool,
        may_fuse: bool,
        look: bool,
        donate: Donate,
    ) -> tuple[ShardedTree | None, ShardedOptState]:
        """The updates in pieces that are to be added, None where a kernel has added them, and the
        optimizer's next state. Collectives: those that the optimizer asks for.

        Of the next state, some leaves lie beside the params, and others in their place already.
        With `look`, `placed` compares these to the bit.

        Args:
            flats: of the params, one per bucket, as `holding` says.
            by_kernel: whether one kernel adds all updates to the flats; only where it `fuses`.
            may_fuse: whether kernels may run at all.
            donate: what may be written over. Unless it is nothing, the state is used up.
        """
        before, current = state.brought_for(self._brought).local, self.across.current
        current.ferry.begin(look=look, over=bool(donate))
        kernel = self.optimizer.fused if by_kernel else None
        try:
            with ranged("update"):
                updates = None
                if kernel is not None:
                    # A kernel alone sees no leaves, but flats (piece,)
                    current.begin(donate=donate)
                    pieces = own_pieces(flats, holding)
                    given, own = map(optree.tree_leaves, (grads.flats(), pieces))
                    after = self.across.on_flats.fused(kernel, given, before, own)
                else:
                    takes_rows = self._takes_rows_of(grads, may_fuse=may_fuse)
                    given = grads.local_rows if takes_rows else grads.local_tree
                    params = pieces_of(flats, holding)
                    lying = grads.known_homes, params.known_homes, before.homes.values()
                    current.begin(*lying, donate=donate)
                    own, tree = params.local_tree, before.tree
                    # Kernels for some of the leaves only where nobody else sees the params
                    adds = by_kernel or (may_fuse and donate is True)
                    update = self.optimizer.update_and_add if adds else self.optimizer.update_fn
                    new, tree_after = update(given, tree, own, self.across)
                    if new is not None:
                        same_structure(own, new, what="the optimizer's updates")
                        updates = ShardedTree.of_local(new, grads.holding, self._homes_of(new))
                    same_structure(tree, tree_after, what="the optimizer's next state")
                    leaves = optree.tree_leaves(tree_after)
                    after = before._replace(leaves=leaves, homes=current.state.among(leaves))
                # Those that stay as they are belong to a state that stays valid
                if not donate:
                    still_valid = set(map(id, before.leaves))
                    homes = {
                        at: home
                        for at, home in after.homes.items()
                        if still_valid.isdisjoint(id(after.leaves[n]) for n in at)
                    }
                    after = after._replace(homes=homes)
                return updates, ShardedOptState.of_local(after, state.holding.lying(self._brought))
        except Exception as error:
            note_other_dtype(error, partial(state_on_meta, *self._planned), before.tree)
            raise
        finally:
            # Else they would be alive until the next one
            current.begin()

    def _takes_rows_of(self, grads: ShardedTree, *, may_fuse: bool) -> bool:
        """Whether gradients of tables may be rows; not where all of the optimizer is a kernel or a
        pointwise function, of dense ones, nor where a NaN in one leaf may reach all others by a
        norm."""
        is_dense = self._is_dense or (may_fuse and self._kernel is not None)
        if is_dense or not self.optimizer.takes_rows:
            return False
        if not self._needs_finite:
            return True
        leaves = optree.tree_leaves(grads.local_rows)
        return all(leaf.is_finite for leaf in leaves if isinstance(leaf, Rows))

    def _homes_of(self, updates: Any) -> list[Home | None]:
        """By bucket, the flat that updates are cut from; None: they are loose."""
        leaves = self.layout.treedef.flatten_up_to(updates)
        own = [[leaves[n] for n in bucket.leaves] for bucket in self.layout.buckets]
        return [*map(self.across.current.updates.home_of, own)]

    def fuses(self, flats: Sequence[Tensor]) -> bool:
        """Whether one kernel adds all updates to these flats of params itself."""
        if self._kernel is None:
            return False
        trained = [bucket.trainable for bucket in self.layout.buckets]
        return self.across.on_flats.fuses(self._kernel, [*compress(flats, trained)])


def _asks_statistics(optimizer: Transform) -> bool:
    """Whether a part of it asks for norms or other sums."""
    return optimizer.needs is Needs.STATISTICS or any(map(_asks_statistics, optimizer.parts))
