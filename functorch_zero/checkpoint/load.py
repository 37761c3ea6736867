"""Loading: each rank reads the elements that it is to hold, however the state was cut when it was
saved."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import base_of, storage_id
from ..errors import MismatchError, StructureError
from ..layout.sharded_tree import ShardedTree
from ..params import as_local, is_on_engine, map_local
from ..sharded.state import adopt_state
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.state import State
from ..tree import is_flagged, path_matches, paths, storages
from .agreement import together
from .block_io import Wanted, read_wanted
from .catalogue import check_sizes, latest, read_manifest
from .contents import Contents, Held, Step, contents_of, donates, group_of, optimizer_of
from .errors import CheckpointError
from .files import counts_in, step_folder
from .frozen import crc_shares, crcs_from
from .manifest import Leaf, LeftOut, Manifest, encode_manifest
from .places import Place, Places, find_places
from .safetensors_file import DTYPES


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
    beyond the state (two states if the step doesn't donate): 8 MiB, and 40 bytes for each piece
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
        CheckpointError: on every rank, with the same words: there is no such checkpoint.
        CorruptError: it is damaged; the file is named.
        StructureError: leaves, shapes or dtypes are not `like`'s, or frozen params have other
            values; they are named.
        DonatedError: `like` was used up by a step.
    """
    allowed = Allowed(allow_missing, allow_extra, cast)
    return _Load(Path(root), step, like, allowed).run(count)


class _Load:
    """One load, on one rank."""

    def __init__(self, root: Path, step: Step, like: State, allowed: Allowed):
        self._root = root
        self._step = step
        self._like = like
        self._allowed = allowed
        self._group = group_of(step)
        self._manifest: Manifest | None = None
        self._old: Contents | None = None  # of `like`
        self._numbers: dict[str, int] = {}  # of the checkpoint's leaves, by path
        # Left out of the checkpoint: `like` must have them as they were
        self._frozen: list[LeftOut] = []
        self._places: Places | None = None  # of the elements that this rank reads
        self._state: State | None = None  # the result

    @torch.no_grad()
    def run(self, count: int | None) -> Restored:
        """Choose, prepare, read: each on all ranks or on none."""
        # Rank 0 chooses, as ranks may see a shared folder at different moments
        chosen = together(self._group, f"load from {self._root}", lambda: self._choose(count))[0]
        what = f"load step {chosen} from {self._root}"
        # Every rank reads the manifest itself: a local disk would show another one, or none
        told = together(self._group, what, lambda: self._prepare(chosen))
        if len({one["digest"] for one in told}) > 1:
            raise MismatchError(
                f"could not {what}: the ranks see different manifests. Remedy: a folder they all "
                "share"
            )
        shares = [one["shares"] for one in told]
        # All ranks agree by now, and the first write comes
        together(self._group, what, lambda: self._read(shares))
        assert self._state is not None and self._manifest is not None
        return Restored(self._state, self._manifest.user)

    def _choose(self, count: int | None) -> int:
        """The step to load; rank 0's word counts."""
        if self._group.rank != 0:  # any number: only rank 0's is taken
            return -1
        found = latest(self._root) if count is None else count
        counts = counts_in(self._root)
        if found is None or found not in counts:
            which = "no complete checkpoint" if count is None else f"no checkpoint of step {count}"
            raise CheckpointError(
                f"there is {which}; steps found: {', '.join(map(str, counts[-10:])) or 'none'}"
            )
        # Rank 0 looks at the sizes of all files; other ranks at those of the files that they read
        if count is not None:
            check_sizes(self._root, count)
        return found

    def _prepare(self, count: int) -> dict[str, Any]:
        """Check all that this rank can check before a tensor is written to."""
        self._manifest = manifest = read_manifest(self._root, count)
        self._old = contents_of(self._step, self._like)
        optimizer = optimizer_of(self._step)
        # The optimizer is for the error's text alone; structure decides
        printed = None if optimizer is None else repr(optimizer)
        check_match(self._old, manifest, self._allowed, printed)
        self._numbers = {leaf.path: number for number, leaf in enumerate(manifest.leaves)}
        self._places = find_places(manifest, step_folder(self._root, count), self._wanted())
        own = {held.path: held for held in self._old.held}
        self._frozen = [one for one in left_out_of(manifest, self._allowed) if one.leaf.path in own]
        kept = [own[leaf.path] for leaf, _ in self._frozen]
        dtypes = [DTYPES[leaf.dtype] for leaf, _ in self._frozen]
        return {
            "digest": hashlib.sha256(encode_manifest(manifest)).hexdigest(),
            "shares": crc_shares(kept, dtypes, self._group.rank, self._group.size),
        }

    def _check_frozen(self, shares: Sequence[Sequence[Sequence[int]]]) -> None:
        """Raise unless `like` has the frozen leaves that the checkpoint was saved without, by all
        ranks' shares."""
        found = crcs_from(shares, len(self._frozen))
        pairs = zip(self._frozen, found, strict=True)
        others = [leaf.path for (leaf, before), now in pairs if before != now]
        if others:
            raise StructureError(
                "`like` has other values in frozen leaves that the checkpoint was saved without: "
                f"{some_of(others)}. Remedy: give step.init the params of the run that saved it; "
                "allow_missing= takes others"
            )

    def _wanted(self) -> dict[int, tuple[int, int]]:
        """The elements [start, stop) that this rank reads, by the leaf's number."""
        assert self._manifest is not None and self._old is not None
        wanted = {}
        for held in self._old.held:
            number = self._numbers.get(held.path)
            if number is not None:
                # Of a summed leaf also later rows, see `_rows`
                stop = self._manifest.leaves[number].numel if held.summed else held.stop
                wanted[number] = (held.start, stop)
        return wanted

    def _read(self, shares: Sequence[Sequence[Sequence[int]]]) -> None:
        """Make the state and fill it. From here on, a step that donates has used `like` up."""
        self._check_frozen(shares)
        manifest = self._manifest
        assert manifest is not None and self._old is not None and self._places is not None
        state = state_to_fill(self._step, self._like)
        tensors = [leaf for leaf in optree.tree_leaves(as_local(state)) if isinstance(leaf, Tensor)]
        new: list[Held] = []
        for before, tensor in zip(self._old.held, tensors, strict=True):
            # The same elements, in the new tensors
            new.append(before._replace(tensor=tensor))

        parts = self._parts(new)
        # File by file: blocks that several leaves share are read once
        for file, places in self._places.by_file():
            runs: list[Wanted] = []
            for place in places:
                runs += _runs(parts[place.leaf], place, manifest.leaves[place.leaf])
            read_wanted(file, runs)
        # The first lies in place; the others are added when all is read
        for first, *others in parts.values():
            for other in others:
                first.tensor.add_(other.tensor)
        self._state = _finished(state, self._old._replace(held=new), manifest)

    def _parts(self, new: Sequence[Held]) -> dict[int, list[Held]]:
        """What to read of each leaf, by its number, with flat tensors. Missing leaves are copied
        from `like`."""
        assert self._manifest is not None and self._old is not None
        parts = {}
        for before, held in zip(self._old.held, new, strict=True):
            number = self._numbers.get(held.path)
            if number is not None:
                # A summed leaf is read by rows of the saving ranks, of which there may be more or
                # fewer
                found = _rows(held, self._manifest.leaves[number]) if held.summed else [held]
                # Views, since a blank state's tensors lie row by row
                flat = [part._replace(tensor=part.tensor.detach().view(-1)) for part in found]
                parts[number] = flat
            elif held.tensor is not before.tensor:
                held.tensor.copy_(before.tensor)  # missing, and allowed to be
        return parts


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
    want = {*(h.path for h in contents.held), *contents.values}
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
    for held in contents.held:
        if held.path in saved:
            problems += _misfits(held, saved[held.path], allowed)
        elif held.path in manifest.values:
            problems.append(f"{held.path} is a tensor here, a number in the checkpoint")
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
    text = ", ".join(listed[:5])
    if len(listed) > 5:
        text += f" and {len(listed) - 5} more"
    return text


def _misfits(held: Held, leaf: Leaf, allowed: Allowed) -> list[str]:
    """The difference in shape or dtype between a leaf here and in the checkpoint, if any."""
    rows_aside = int(held.summed)  # any number of them will do
    if held.shape[rows_aside:] != leaf.shape[rows_aside:]:
        return [f"{held.path} has shape {held.shape} here, {leaf.shape} in the checkpoint"]
    dtype = DTYPES[leaf.dtype]
    if held.tensor.dtype != dtype and not allowed.cast:
        return [
            f"{held.path} is {held.tensor.dtype} here, {dtype} in the checkpoint (cast=True "
            "converts)"
        ]
    return []


def _rows(held: Held, leaf: Leaf) -> list[Held]:
    """The rows of a saved leaf that this rank is to add up: every N-th on N ranks. Zeros where
    there are fewer.

    The first one is in place, in `held.tensor`; the others have tensors of their own.
    """
    # Where fewer ranks saved, this rank adds nothing to the sum
    held.tensor.zero_()
    n = held.tensor.numel()  # of a row
    if not n:
        return [held]
    first, num_ranks = held.start // n, held.shape[0]  # this rank's row here; one row per rank
    rows: list[Held] = []
    for row in range(first, leaf.shape[0], num_ranks):
        tensor = torch.empty_like(held.tensor) if rows else held.tensor
        rows.append(held._replace(tensor=tensor, start=row * n, stop=(row + 1) * n))
    return rows or [held._replace(start=0, stop=0)]  # nothing to read, and the zeros stay


def _runs(parts: Iterable[Held], place: Place, leaf: Leaf) -> Iterator[Wanted]:
    """What to read of a piece, for parts of its leaf, each with a flat tensor."""
    for held in parts:
        # The elements in both, if any
        start, stop = max(held.start, place.start), min(held.stop, place.stop)
        if start < stop:
            offset = place.offset + (start - place.start) * leaf.width  # bytes, in the file
            yield Wanted(offset, stop - start, leaf.dtype, held.tensor, start - held.start)


def _finished(state: State, contents: Contents, manifest: Manifest) -> State:
    """The state with that which is in no file: values that are no tensors, and orders of dims."""
    held = {h.path: h.tensor for h in contents.held}
    new: dict[str, Any] = {}  # leaves by path, in the places of those in `state`
    for path, value in manifest.values.items():
        if path in contents.values:
            new[path] = value
    for leaf in manifest.leaves:
        tensor = held.get(leaf.path)
        # Only where the leaf is whole here; a piece lies flat in any case
        if leaf.order is not None and tensor is not None and tensor.shape == leaf.shape:
            new[leaf.path] = in_order(tensor, leaf.order)
    names = iter(paths(as_local(state)))
    finished: State = map_local(lambda leaf: new.get(next(names), leaf), state)
    # The tensors were made for this state, so that its first step need not copy them
    for node in optree.tree_leaves(finished, is_leaf=is_on_engine):
        if isinstance(node, ShardedTree):
            node.adopt()
        elif isinstance(node, ShardedOptState):
            adopt_state(node)
    return finished


def state_to_fill(step: Step, like: State) -> State:
    """A state of the same structure whose values are to be overwritten, all of them: in `like`'s
    storage, where the step donates."""
    if not donates(step):
        return _blank_state(like)
    assert like.sharding is not None  # only sharded steps donate
    like.sharding.donations.take()
    # Before the first write, so that a failure half-way leaves `like` refused, not wrong
    return _handed_on(like)


def _blank_state(like: State) -> State:
    """New tensors. Leaves that are views of one flat are so again, but no two have elements in
    common."""
    flats: dict[int, list[_BlankFlat]] = {}  # by the id of the one that like's leaves are views of
    state: State = map_local(
        lambda leaf: _blank(leaf, flats) if isinstance(leaf, Tensor) else leaf, like
    )
    return state


def _handed_on(like: State) -> State:
    """The same of a state that is donated: of each tree and optimizer's state in its value the next
    one, in the storage that nothing else in the value has. The old one is used up. Other tensors
    are new, since a step doesn't write over them either."""
    holders: Counter[int] = Counter()
    for node in optree.tree_leaves(like.value, is_leaf=is_on_engine):
        holders.update(storages(as_local(node)))
    flats: dict[int, list[_BlankFlat]] = {}  # as of `_blank`

    def is_alone(x: Tensor) -> bool:
        return holders[storage_id(x)] == 1

    def next_of(node: Any) -> Any:
        if isinstance(node, ShardedTree) and node.holding.form == "held":
            own = node.flats(to_write=True)
            # Frozen ones go from tree to tree. A node that the value has twice shares all.
            if any(map(is_alone, own)):
                return node.handed_on([x if is_alone(x) else torch.zeros_like(x) for x in own])
        if isinstance(node, ShardedOptState) and _lie_apart(node):
            leaves = [
                leaf for leaf in optree.tree_leaves(node.as_it_lies) if isinstance(leaf, Tensor)
            ]
            if all(map(is_alone, leaves)):
                return node.handed_on(node.as_it_lies)
        made = map_local(blank, node)
        # An empty leaf may lie in another tree's flat
        return made.apart() if isinstance(made, ShardedTree) else made

    def blank(leaf: Any) -> Any:
        return _blank(leaf, flats) if isinstance(leaf, Tensor) else leaf

    value = tree_map(next_of, like.value, is_leaf=is_on_engine)
    return _blank_state(like.replace(value=None)).replace(value=value)


def _lie_apart(state: ShardedOptState) -> bool:
    """Whether each leaf of an optimizer's state can be read into, in a place of its own."""
    used = _Ranges()
    for leaf in optree.tree_leaves(state.as_it_lies):
        if not isinstance(leaf, Tensor):
            continue
        in_rows = leaf.dim() == 0 or _can_be_read_into(leaf)
        if not (in_rows and used.take(leaf.data_ptr(), leaf.nbytes)):
            return False
    return True


class _Ranges:
    """Ranges of numbers, apart from each other."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # in order
        self._stops: list[int] = []

    def take(self, start: int, length: int) -> bool:
        """Add a range, and return True; False where it overlaps one that is here."""
        stop, n = start + length, bisect_right(self._starts, start)
        if not length:
            return True
        if n > 0 and start < self._stops[n - 1]:
            return False
        if n < len(self._starts) and self._starts[n] < stop:
            return False
        self._starts.insert(n, start)
        self._stops.insert(n, stop)
        return True


class _BlankFlat(NamedTuple):
    """A new flat, and the elements of it that are some leaf's."""

    flat: Tensor
    used: _Ranges


def _blank(leaf: Tensor, flats: dict[int, list[_BlankFlat]]) -> Tensor:
    """A tensor like the leaf; a view of a new flat, added to `flats`, where the leaf is a view of
    one."""
    # The flat that a sharded tree's leaves are views of: collectives move it whole
    base = base_of(leaf)
    if base is not None and _is_plain_view(leaf, base):
        offset = leaf.storage_offset() - base.storage_offset()
        flat = _flat_with_room(flats.setdefault(id(base), []), base, int(offset), leaf.numel())
        # At the same place in the new flat
        new = flat.as_strided(leaf.shape, leaf.stride(), offset)
    else:
        new = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return new.requires_grad_() if leaf.requires_grad else new


def _flat_with_room(made: list[_BlankFlat], base: Tensor, offset: int, numel: int) -> Tensor:
    """The first of the flats like `base` in which no leaf has these elements; a new one if need
    be."""
    # Two trees of a first state may lie in one flat, and have other values by the time of a save
    for flat, used in made:
        if used.take(offset, numel):
            return flat
    # Zeros: no leaf writes to the padding
    flat, used = torch.zeros(base.shape, dtype=base.dtype, device=base.device), _Ranges()
    used.take(offset, numel)
    made.append(_BlankFlat(flat, used))
    return flat


def _can_be_read_into(leaf: Tensor) -> bool:
    return leaf.dim() > 0 and leaf.is_contiguous() and not is_flagged(leaf)


def _is_plain_view(leaf: Tensor, base: Tensor) -> bool:
    """Whether a view is a run of its base's elements, in the base's dtype."""
    return leaf.is_contiguous() and base.is_contiguous() and base.dtype == leaf.dtype


def in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A copy whose dims lie in memory in this order, from the slowest to the fastest."""
    # `copy_` maps elements by index, whatever the order in memory
    copy = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
