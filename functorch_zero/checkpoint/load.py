"""Loading: each rank reads the elements that it is to hold, however the state was cut when it was
saved."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import MismatchError, StructureError, first_few
from ..groups.protocol import Group
from ..layout.home import HomedLeaves
from ..layout.sharded_tree import ShardedTree
from ..params import as_local, is_on_engine, map_local, map_nodes, nodes_of
from ..sharded.state import lay_out_state
from ..sharded_optim.ferry import is_moved
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.state import State
from ..tree import is_flagged, path_matches, paths, storages
from .agreement import nothing, together
from .block_io import Target, read_leaves
from .catalogue import chosen, read_manifest
from .contents import Contents, LocalLeaf, Step, contents_of, donates, group_of, optimizer_of
from .files import step_folder
from .frozen import crc_shares, crcs_from
from .manifest import Leaf, LeftOut, Manifest, encode_manifest
from .places import Places, find_places
from .save import wait_for_saves


class Restored(NamedTuple):
    """The results of `load`."""

    state: State
    user: Any  # the data that `save` was given


Chosen = bool | str | Sequence[str]  # leaves: all, none, or those of patterns of paths


class Allowed(NamedTuple):
    """The differences allowed between a checkpoint and the state it is loaded into."""

    missing: Chosen  # leaves that the checkpoint lacks
    extra: Chosen  # leaves that the state lacks
    cast: bool  # other dtypes


def not_chosen(paths: Iterable[str], chosen: Chosen) -> list[str]:
    """The paths that are not chosen, sorted."""
    if isinstance(chosen, bool):
        return [] if chosen else sorted(paths)
    patterns = [chosen] if isinstance(chosen, str) else chosen
    return sorted(
        path for path in paths if not any(path_matches(path, pattern) for pattern in patterns)
    )


@torch.no_grad()
def load(
    root: str | os.PathLike[str],
    step: Step,
    *,
    like: State,
    count: int | None = None,
    allow_missing: Chosen = False,
    allow_extra: Chosen = False,
    cast: bool = False,
) -> Restored:
    """Load a checkpoint, saved at any level and world size, into a state of this step. Every rank
    calls this.

    Each rank reads the rows of all files, and only the blocks in which its elements lie, and checks
    their checksums. Values are bit for bit those that were saved. Three exchanges of JSON; memory
    beyond the state (two states if the step doesn't donate): 8 MiB, and 32 bytes for each piece
    that is read.

    Args:
        root: the folder of checkpoints.
        step: the step function that the state is for.
        like: a state of `step`, from `step.init`: its structure, dtypes, devices and layout. If
            `step` donates, its storage is used for the result, and it can't be used again, whether
            loading succeeds or not. Frozen params that the checkpoint was saved without are its
            own, and must be the same to the bit.
        count: the step to load; None: the newest whose manifest and file sizes are right (see
            `latest`).
        allow_missing: leaves that the checkpoint lacks keep `like`'s values: all, or those of one
            or several patterns of paths ("params.adapter.**"). Frozen params among them may be
            others than those that it was saved without.
        allow_extra: leaves of the checkpoint that `like` lacks are left out, chosen in the same
            way.
        cast: convert dtypes.

    Raises:
        CheckpointError: on every rank, with the same words: there is no such checkpoint; or the
            `async_save` under way with this step, which ends first, failed.
        CorruptError: it is damaged; the file is named.
        StructureError: leaves, shapes or dtypes are not `like`'s, or frozen params have other
            values; they are named.
        DonatedError: `like` was used up by a step.
    """
    root, allowed = Path(root), Allowed(allow_missing, allow_extra, cast)
    group = group_of(step)

    def choose() -> int:
        # It may still read what a load into `like` writes over: frozen params that it leaves out
        wait_for_saves(step)
        # Rank 0 alone, as ranks may see a shared folder at different moments. It looks at the sizes
        # of all files, and other ranks at those of the files that they read
        return chosen(root, count)[0].step if group.rank == 0 else -1

    chosen_count = together(group, f"load from {root}", choose).of_all[0]
    what = f"load step {chosen_count} from {root}"
    # Every rank reads the manifest itself: a local disk would show another one, or none
    prepared, told = together(
        group,
        what,
        lambda: _prepare(root, chosen_count, step, like, allowed),
        lambda prepared: prepared.facts_for(group),
    )
    if len({one["digest"] for one in told}) > 1:
        raise MismatchError(
            f"could not {what}: the ranks see different manifests. Remedy: a folder they all share"
        )
    shares = [one["shares"] for one in told]
    # All ranks agree by now, and the first write comes
    read = together(group, what, lambda: _read(step, like, prepared, shares), nothing)
    return Restored(read.own, prepared.manifest.user)


class _Prepared(NamedTuple):
    """All that a rank has found out before a tensor is written to."""

    manifest: Manifest
    old: Contents  # of `like`
    places: Places  # of the elements that this rank reads
    # Left out of the checkpoint: `like` must have them as they were
    frozen: list[LeftOut]

    def facts_for(self, group: Group) -> dict[str, Any]:
        """A digest that ranks compare, and the shares of the frozen leaves' CRC-32s."""
        own = {local.path: local for local in self.old.leaves}
        own_frozen = [own[leaf.path] for leaf, _ in self.frozen]
        dtypes = [leaf.dtype for leaf, _ in self.frozen]
        return {
            "digest": hashlib.sha256(encode_manifest(self.manifest)).hexdigest(),
            "shares": crc_shares(own_frozen, dtypes, group.rank, group.size),
        }


def _prepare(root: Path, count: int, step: Step, like: State, allowed: Allowed) -> _Prepared:
    """Check all that this rank can check before a tensor is written to."""
    manifest = read_manifest(root, count)
    old = contents_of(step, like)
    optimizer = optimizer_of(step)
    # The optimizer is for the error's text alone; structure decides
    printed = None if optimizer is None else repr(optimizer)
    check_match(old, manifest, allowed, printed)
    wanted = {}
    for local in old.leaves:
        number = manifest.numbers.get(local.path)
        if number is not None:
            # Of a summed leaf also later rows, see `_rows`
            stop = manifest.leaves[number].numel if local.summed else local.stop
            wanted[number] = (local.start, stop)
    places = find_places(manifest, step_folder(root, count), wanted)
    own = {local.path for local in old.leaves}
    frozen = [one for one in left_out_of(manifest, allowed) if one.leaf.path in own]
    return _Prepared(manifest, old, places, frozen)


def _check_frozen(frozen: Sequence[LeftOut], shares: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise unless `like` has the frozen leaves that the checkpoint was saved without, by all
    ranks' shares."""
    pairs = zip(frozen, crcs_from(shares, len(frozen)), strict=True)
    others = [leaf.path for (leaf, before), now in pairs if before != now]
    if others:
        raise StructureError(
            "`like` has other values in frozen leaves that the checkpoint was saved without: "
            f"{some_of(others)}. Remedy: give step.init the params of the run that saved it; "
            "allow_missing= takes others"
        )


def _read(
    step: Step, like: State, prepared: _Prepared, shares: Sequence[Sequence[Sequence[int]]]
) -> State:
    """Make the state and fill it. From here on, a step that donates has used `like` up."""
    _check_frozen(prepared.frozen, shares)
    manifest, old = prepared.manifest, prepared.old
    state, new = state_to_fill(step, like, old, manifest.numbers)
    targets: dict[int, list[Target]] = {}  # by the leaf's number
    for local in new:
        number = manifest.numbers.get(local.path)
        if number is not None:
            # A view, since a blank state's tensors lie row by row
            target = Target(local.tensor.detach().view(-1), local.start)
            # A summed leaf is read by rows of the saving ranks, of which there may be more or fewer
            is_summed, leaf = local.summed, manifest.leaves[number]
            targets[number] = _rows(target, leaf, local.shape[0]) if is_summed else [target]
    read_leaves(prepared.places, targets)
    # The first lies in place; the others are added when all is read
    for first, *others in targets.values():
        for other in others:
            first.tensor.add_(other.tensor)
    return _finished(state, old._replace(leaves=new), manifest)


def check_match(
    contents: Contents, manifest: Manifest, allowed: Allowed, optimizer: str | None
) -> None:
    """Raise `StructureError`, naming leaves, unless a checkpoint fits a state as far as is asked.

    Args:
        optimizer: the present one, as it prints; None: a program has any number.
    """
    saved = {leaf.path: leaf for leaf in manifest.leaves}  # path -> leaf
    # Not saved, and yet it says what they were
    saved |= {leaf.path: leaf for leaf, _ in left_out_of(manifest, allowed)}
    # Paths of tensors and of plain values: each must be in both
    have = {*saved, *manifest.values}
    want = {*(h.path for h in contents.leaves), *contents.values}
    problems = []
    lacking = not_chosen(want - have, allowed.missing)
    if lacking:
        problems.append(
            f"the checkpoint lacks {some_of(lacking)} (allow_missing=True, or patterns, keeps "
            "`like`'s values)"
        )
    extra = not_chosen(have - want, allowed.extra)
    if extra:
        problems.append(
            f"the checkpoint has {some_of(extra)}, which `like` lacks (allow_extra=True, or "
            "patterns, leaves it out)"
        )
    for local in contents.leaves:
        if local.path in saved:
            leaf = saved[local.path]
            problems += misfits(local.path, local, leaf.shape, leaf.dtype, allowed)
        elif local.path in manifest.values:
            problems.append(f"{local.path} is a tensor here, a number in the checkpoint")
    for path in contents.values:
        if path in saved:
            problems.append(f"{path} is a tensor in the checkpoint, a number here")
    if not problems:
        return
    text = "the checkpoint is of another model, optimizer, reduction or dtype: "
    text += "; ".join(problems[:5])
    if len(problems) > 5:
        text += f"; and {len(problems) - 5} more"
    # A hint: most such errors come from another optimizer
    if None not in (manifest.optimizer, optimizer) and manifest.optimizer != optimizer:
        text += (
            f". Its optimizer was {manifest.optimizer}, the present one is {optimizer}. To keep "
            'the weights and begin the optimizer anew: allow_missing="opt_state.**", '
            'allow_extra="opt_state.**"'
        )
    raise StructureError(text)


def left_out_of(manifest: Manifest, allowed: Allowed) -> list[LeftOut]:
    """The frozen leaves that a checkpoint was saved without, but for those that may be missing."""
    needed = {*not_chosen((leaf.path for leaf, _ in manifest.left_out), allowed.missing)}
    return [one for one in manifest.left_out if one.leaf.path in needed]


def some_of(names: Iterable[str]) -> str:
    """The first names, those of params before others, and the number of the rest."""
    listed = sorted(names, key=lambda name: (not name.startswith("params."), name))
    return first_few(listed, 5)


def misfits(
    name: str, local: LocalLeaf, shape: tuple[int, ...], dtype: torch.dtype, allowed: Allowed
) -> list[str]:
    """The difference in shape or dtype between a leaf and what is to be read into it, if any."""
    rows_aside = int(local.summed)  # any number of them will do
    if local.shape[rows_aside:] != shape[rows_aside:]:
        return [f"{name} has shape {shape}, expected {local.shape}"]
    if local.tensor.dtype != dtype and not allowed.cast:
        return [f"{name} is {dtype}, expected {local.tensor.dtype} (cast=True converts)"]
    return []


def _rows(target: Target, leaf: Leaf, num_ranks: int) -> list[Target]:
    """The rows of a saved leaf that this rank is to add up: every N-th on N ranks. Zeros where
    there are fewer.

    The first one is in place, in the target's tensor; the others have tensors of their own.
    """
    # Where fewer ranks saved, this rank adds nothing to the sum
    target.tensor.zero_()
    n = target.tensor.numel()  # of a row
    if not n:
        return [target]
    rows: list[Target] = []
    for row in range(target.start // n, leaf.shape[0], num_ranks):  # from this rank's own on
        tensor = torch.empty_like(target.tensor) if rows else target.tensor
        rows.append(Target(tensor, row * n))
    return rows or [Target(target.tensor[:0], 0)]  # nothing to read, and the zeros stay


def _finished(state: State, contents: Contents, manifest: Manifest) -> State:
    """The state with that which is in no file: values that are no tensors, and orders of dims."""
    tensors = {h.path: h.tensor for h in contents.leaves}
    new: dict[str, Any] = {}  # leaves by path, in the places of those in `state`
    for path, value in manifest.values.items():
        if path in contents.values:
            new[path] = value
    for leaf in manifest.leaves:
        tensor = tensors.get(leaf.path)
        # Only where the leaf is whole here; a piece lies flat in any case
        if leaf.order is not None and tensor is not None and tensor.shape == leaf.shape:
            new[leaf.path] = in_order(tensor, leaf.order)
    names = iter(paths(as_local(state)))
    finished: State = map_local(lambda leaf: new.get(next(names), leaf), state)
    return finished


def state_to_fill(
    step: Step, like: State, old: Contents, filled: Container[str]
) -> tuple[State, list[LocalLeaf]]:
    """A state of the same structure, in which the caller overwrites the leaves with the paths
    `filled`, and the others have their values; and the leaves of `old`, which are `like`'s, in the
    new tensors.

    Where the step donates, trees and optimizers' states have the storage of `like`, which is used
    up, but for what a node before them has. Other tensors are new, since a step doesn't write over
    them either.
    """
    uses_up = donates(step)
    nodes = [x for x in nodes_of(like.value) if is_on_engine(x)]
    homes = {id(node): node.homes() for node in nodes if isinstance(node, ShardedTree)}
    taken: set[int] = set()  # storages of the nodes so far
    if uses_up:
        assert like.sharding is not None  # only sharded steps donate
        like.sharding.take_storage()

    def takes(tensors: Sequence[Tensor]) -> bool:
        """Whether the new state has these tensors of `like`."""
        own = storages(tensors)
        is_free = uses_up and taken.isdisjoint(own)
        taken.update(own)
        return is_free

    def next_of(node: Any) -> Any:
        if isinstance(node, ShardedTree):
            flats = []
            for home in homes[id(node)]:
                own = None if home is None else home.flat
                flats.append(own if own is None or takes([own]) else own.clone())
            return ShardedTree.of_flats(flats, node.holding)
        if not isinstance(node, ShardedOptState):
            return _blank(node)
        lying = node.local
        if takes([*filter(is_moved, lying.leaves)]) and _can_be_filled(node):
            # Counts are new ones, which users may have as they are
            tree = tree_map(lambda x: x if is_moved(x) else _blank(x), lying.tree)
            local = HomedLeaves.of(tree, lying.homes.values())
            return ShardedOptState.of_local(local, node.holding)
        # Row by row, so that they can be read into
        tree = tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, node.beside)
        return lay_out_state(tree, node.holding)

    value = map_nodes(next_of, like.value)
    made: State = tree_map(_blank, like.replace(value=None)).replace(value=value)
    # Before the first write, so that a failure half-way leaves `like` refused, not wrong
    for node in nodes if uses_up else ():
        if isinstance(node, ShardedTree):
            # Of all buckets, also of those that several nodes have
            for home in filter(None, homes[id(node)]):
                home.handed_on()
        else:
            node.use_up()
    tensors = [leaf for leaf in optree.tree_leaves(as_local(made)) if isinstance(leaf, Tensor)]
    for local, tensor in zip(old.leaves, tensors, strict=True):
        if local.path not in filled and tensor is not local.tensor:
            tensor.copy_(local.tensor)
    new = [h._replace(tensor=tensor) for h, tensor in zip(old.leaves, tensors, strict=True)]
    return made, new


def _can_be_filled(state: ShardedOptState) -> bool:
    """Whether each leaf of an optimizer's state can be read into, in a place of its own. Those that
    are cut from its flats can."""
    _, leaves, homes = state.local
    at_home = {n for positions in homes for n in positions}
    others = [leaf for n, leaf in enumerate(leaves) if n not in at_home and is_moved(leaf)]
    are_apart = len(storages(others)) == len(others)
    return are_apart and all(leaf.is_contiguous() and not is_flagged(leaf) for leaf in others)


def _blank(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_like(
        leaf, requires_grad=leaf.requires_grad, memory_format=torch.contiguous_format
    )


def in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A copy whose dims lie in memory in this order, from the slowest to the fastest."""
    # `copy_` maps elements by index, whatever the order in memory
    copy = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
