"""Params after an update, published to the ranks that hold them between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_private import storage_id
from ..groups import labelled
from ..groups.mesh import Axes
from ..groups.protocol import Group, Work
from ..layout.extent import Rows
from ..layout.flat_buffers import (
    cut,
    own_piece,
)
from ..layout.home import Home
from ..layout.layout import Bucket
from ..layout.levels import level_of
from ..layout.sharded_tree import ShardedTree
from ..optim.apply_updates import check_no_complex_for_real
from ..places import ByUnit
from ..runtime.prefetch import PrefetchOrder
from ..runtime.same_uses import SameUses
from ..runtime.unshard import message_of
from ..tree import dotted
from .placed import emptied


def publish(
    after: ShardedTree,
    flats: Sequence[Tensor],
    updates: ShardedTree | None,
    axes: Axes,
    *,
    empty: Sequence[Callable[[Tensor], Tensor]],
) -> None:
    """Write params + updates to the flats of the next params, and send these to the ranks that hold
    them between steps; with updates None the sums are there already.

    Args:
        after: the next params.
        flats: of the params, one per bucket; they may be those of the next.
        updates: this rank's pieces; where one is None, the leaf stays as it is.
        empty: per bucket, makes a flat like another one, where params lie between steps.

    Levels 1 and 2: one all-gather per trained bucket along the shard axis, started when the bucket
    is ready; of leaves that are gathered in fewer bytes than they are stored in, in that form. With
    `state_axes="both"` one along the replicate axis comes first, at level 3 too.

    Raises:
        StructureError: an update is complex, and its leaf is real. Nothing has been written then.
    """
    piece_number, layout = axes.piece_number, after.sharding.layout
    # Per leaf in tree order, (n,) or None
    given = None if updates is None else layout.treedef.flatten_up_to(updates.local_rows)
    added = [] if updates is None else updates.known_homes
    if given is not None:
        # Before anything is written
        check_no_complex_for_real(
            given, layout.leaves, lambda n: layout.leaves[n].path, axes.world.rank
        )
    started, published = {}, after.published()
    rows = zip(layout.buckets, flats, after.flats(), strict=True)
    for b, (bucket, flat, new) in enumerate(rows):
        if not bucket.trainable:
            continue
        if given is not None:
            piece, out = (own_piece(x, bucket, piece_number) for x in (flat, new))
            own = [given[n] for n in bucket.leaves]
            _add(piece, own, added[b], bucket, piece_number, out=out)
        over = _published_along(bucket, axes)
        # The all-gather runs while the next bucket is added
        if over or bucket.is_published:
            name = dotted(after.holding.name, bucket.name)
            started[b] = _Publishing(new, bucket, name, over, axes.shard.group, empty[b])
    _finish([*started.values()])
    for b, publishing in started.items():
        published[b] = publishing.published
    if layout.publishes:
        after.note_published(published)


def _add(
    piece: Tensor,
    updates: Sequence[Any],
    home: Home | None,
    bucket: Bucket,
    piece_number: int,
    *,
    out: Tensor,
) -> None:
    """A piece of a bucket (piece,) + the updates of its leaves, (n,) or None each, or rows of its
    one leaf; `home`: that they are cut from, if it is known."""
    is_of_rows = isinstance(updates[0], Rows)
    if home is not None and not is_of_rows:
        # Rounded to the param's dtype before the sum, as the oracle does
        torch.add(piece, home.flat.to(piece.dtype), out=out)
        return
    if storage_id(out) != storage_id(piece):
        out.copy_(piece)
    if is_of_rows:
        updates[0].add_to(out)
        return
    # Leaf by leaf, but for those that stay as they are
    targets, added = list[Tensor](), list[Tensor]()
    for own, update in zip(cut(out, bucket, piece_number), updates, strict=True):
        if update is not None:
            targets.append(own)
            added.append(update.to(own.dtype))
    if targets:
        torch._foreach_add_(targets, added)


def in_new_flats(
    params: ShardedTree, flats: Sequence[Tensor], empty: Sequence[Callable[[Tensor], Tensor]]
) -> ShardedTree:
    """A tree for the next params in new flats, without values yet, but for frozen ones; these
    params stay as they are. `flats`, `empty`: as in `publish`."""
    rows = zip(params.sharding.layout.buckets, flats, empty, strict=True)
    made = [make(flat) if bucket.trainable else flat for bucket, flat, make in rows]
    return params.with_flats(made, params.holding_as_shown)


def in_copied_flats(
    params: ShardedTree,
    flats: Sequence[Tensor],
    piece_number: int,
    empty: Sequence[Callable[[Tensor], Tensor]],
) -> ShardedTree:
    """Such a tree, of which this rank's pieces are copies, to be updated in place."""
    made = in_new_flats(params, flats, empty)
    for bucket, *both in zip(params.sharding.layout.buckets, flats, made.flats(), strict=True):
        if bucket.trainable:
            old, new = (own_piece(flat, bucket, piece_number) for flat in both)
            new.copy_(old)
    return made


class _Publishing:
    """A bucket's new pieces on their way to the ranks that hold them between steps, or use them: an
    all-gather along each axis.

    Args:
        held: the flat that this rank holds, with its new piece.
        name: of the bucket, in labels of collectives.
        over: the axes along which ranks update pieces of held flats, outermost first.
        shard: the ranks that hold the other pieces.
        empty: makes a flat like another one.

    Attributes:
        published: the published flat, once it is under way; see Note [published flats] in `layout`.
    """

    def __init__(
        self,
        held: Tensor,
        bucket: Bucket,
        name: str,
        over: Sequence[Group],
        shard: Group,
        empty: Callable[[Tensor], Tensor],
    ):
        self.published: Tensor | None = None
        self._held, self._bucket, self._empty = held, bucket, empty
        self._shard = labelled(shard, f"{name}/publish")
        # Per axis: its group, the out (N * k,), and this rank's piece of it (k,), a view. Taken
        # from the end: the innermost axis is the last one.
        self._stages: list[tuple[Group, Tensor, Tensor]] = []
        for axis in over:
            group = labelled(axis, f"{name}/publish")
            piece = held.view(group.size, -1)[group.rank]
            self._stages.append((group, held, piece))
            # The piece is itself cut along the next axis
            held = piece
        self._work = self._next()

    def _next(self) -> Work | None:
        if self._stages:
            # The innermost axis first: it fills the piece that travels along the next
            group, out, piece = self._stages.pop()
            return group.all_gather(out, piece)
        if self._bucket.is_published and self.published is None:
            return self._publish()
        return None

    def _publish(self) -> Work:
        """Send the held piece, as it travels to be used."""
        group = self._shard
        sent = message_of(self._held, self._bucket, group.rank)
        # As large as all messages, without memory of its own
        like = sent.new_empty(()).expand(group.size * sent.numel())
        self.published = self._empty(like)
        own = self.published.view(group.size, -1)[group.rank].copy_(sent)
        return group.all_gather(self.published, own)

    def go_on(self) -> bool:
        """Wait for the all-gather under way, and start the next one, if there is one."""
        if self._work is not None:
            self._work.wait()
            self._work = self._next()
        return self._work is not None


def _finish(started: list[_Publishing]) -> None:
    """Wait for all of them. Each starts its next all-gather before the last ones have ended."""
    while started:
        # In bucket order on every rank, so the second axis's gathers start in one order, too
        started = [publishing for publishing in started if publishing.go_on()]


def _published_along(bucket: Bucket, axes: Axes) -> list[Group]:
    """The axes along which ranks update pieces of a flat that each holds between steps, outermost
    first."""
    level = level_of(bucket)
    # Whole params, or pieces that are cut over the shard axis alone
    shard = [axes.shard.group] if level.cuts_state and not bucket.cut.holds_pieces else []
    return shard + ([axes.replicate.group] if level.cuts_state and axes.both else [])


def chosen_params(params: ShardedTree, chosen: ShardedTree, axes: Axes) -> ShardedTree:
    """The params, as held between steps, were the trained ones `chosen`, as `eval_step(params=...)`
    chooses them: an average, say.

    Args:
        chosen: in pieces.

    Collectives: those of `publish`, for all buckets under way at once.

    Raises:
        StructureError: a chosen leaf is not what the layout says.
    """
    layout, number = params.sharding.layout, axes.piece_number
    leaves = layout.treedef.flatten_up_to(chosen.local_tree)
    empty = [torch.empty_like] * len(layout.buckets)
    # Never in place: the state's own params stay as they are
    made = in_copied_flats(params, params.flats(), number, empty)
    for flat, bucket in zip(made.flats(), layout.buckets, strict=True):
        if bucket.trainable:
            # Leaf by leaf: a flat of them would be one more copy
            own = cut(own_piece(flat, bucket, number), bucket, number)
            torch._foreach_copy_(own, [leaves[n] for n in bucket.leaves])
    publish(made, made.flats(), None, axes, empty=empty)
    return made


class SamePublished(SameUses):
    """The published flats that are missing before a pass, which ranks must lack alike: see Note
    [same uses] in `runtime/same_uses.py`."""

    # Ranks meet nowhere between steps, and one of them may have saved or shown something there
    patience = 60.0
    of_two = "ranks have changed params between steps, and not all of them have"
    alone = "params were changed between steps, and not on every rank"
    remedy = "change params on all ranks alike, by the same code; reading them changes nothing"


def flats_of_pass(
    trees: Sequence[ShardedTree],
    order: PrefetchOrder,
    axes: Axes,
    log: list[str],
    places: ByUnit | None,
) -> list[Tensor]:
    """The flats that a pass over these trees uses, one per bucket: the published ones, where there
    are such; else those that hold params between steps.

    Args:
        order: of the passes over these trees.
        log: takes an entry for each gather that is started, which ranks compare.
        places: of params between steps.

    Collectives: an all-gather for each published flat that is missing: `tree_map`, a file or a
    write has made other params. Ranks make sure that all of them start it.

    Raises:
        GroupError: other flats are missing on other ranks.
    """
    held = [tree.flats() for tree in trees]
    if not any(tree.sharding.layout.publishes for tree in trees):
        return [flat for flats in held for flat in flats]
    published = [tree.published() for tree in trees]
    missing = []
    for t, tree in enumerate(trees):
        for b, bucket in enumerate(tree.sharding.layout.buckets):
            if bucket.is_published and published[t][b] is None:
                missing.append((t, b, dotted(tree.holding.name, bucket.name)))
    names = [f"publish {name}" for _, _, name in missing]
    order.agree_before(names, SamePublished)
    log += names
    started = []
    for t, b, name in missing:
        layout = trees[t].sharding.layout
        make, shard = emptied(places, layout)[b], axes.shard.group
        started.append(_Publishing(held[t][b], layout.buckets[b], name, (), shard, make))
    _finish(started)
    for (t, b, _), publishing in zip(missing, started, strict=True):
        published[t][b] = publishing.published
    used = []
    for tree, flats, found in zip(trees, held, published, strict=True):
        tree.note_published(found)
        used += [flat if whole is None else whole for flat, whole in zip(flats, found, strict=True)]
    return used
