"""Loading: each rank reads what it is to hold, whatever the state was cut into when it was
saved."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._torch_private import base_of
from ..errors import MismatchError, StructureError
from ..sharded.train import ShardedTrainStep
from ..step.state import State
from ..tree import paths
from .agreement import together
from .block_io import Wanted, read_wanted
from .catalogue import check_sizes, latest
from .contents import Contents, Held, Step, contents_of, group_of, unsharded_of
from .errors import CheckpointError
from .files import counts_in, step_folder
from .manifest import Leaf, Manifest, Piece, encode_manifest
from .safetensors_file import DTYPES


class Restored(NamedTuple):
    """What `load` gives."""

    state: State
    user: Any  # what `save` was given


class Allowed(NamedTuple):
    """By how much a checkpoint may differ from the state it is loaded into."""

    missing: bool
    extra: bool
    cast: bool


def load(
    root: str | os.PathLike[str],
    step: Step,
    *,
    like: State,
    count: int | None = None,
    allow_missing: bool = False,
    allow_extra: bool = False,
    cast: bool = False,
) -> Restored:
    """Load a checkpoint, saved at any level and world size, into a state of this step. Every rank
    calls this.

    Each rank reads only the blocks in which its elements lie, and checks their checksums. Values
    are bit for bit those that were saved. Three exchanges of JSON; memory beyond the state (two
    states if the step doesn't donate): 8 MiB.

    Args:
        root: the folder of checkpoints.
        step: the step function that the state is for.
        like: a state of `step`, from `step.init`: its structure, dtypes, devices and layout. If
            `step` donates, its storage is used for the result, and it can't be used again, whether
            loading succeeds or not.
        count: the step to load; None: the newest whose manifest and file sizes are right (see
            `latest`).
        allow_missing: leaves that the checkpoint lacks keep `like`'s values.
        allow_extra: leaves of the checkpoint that `like` lacks are left out.
        cast: convert dtypes.

    Raises:
        CheckpointError: on every rank, with the same words: there is no such checkpoint.
        CorruptError: it is damaged; the file is named.
        StructureError: leaves, shapes or dtypes are not `like`'s; they are named.
        DonatedError: `like` was used up by a step.
    """
    return _Load(Path(root), step, like, Allowed(allow_missing, allow_extra, cast)).run(count)


class _Load:
    """One load, on one rank."""

    def __init__(self, root: Path, step: Step, like: State, allowed: Allowed):
        self._root, self._step, self._like, self._allowed = root, step, like, allowed
        self._group = group_of(step)
        self._manifest: Manifest | None = None
        self._old: Contents | None = None  # of `like`
        self._state: State | None = None

    @torch.no_grad()
    def run(self, count: int | None) -> Restored:
        """Choose, prepare, read: each on all ranks or on none."""
        chosen = together(self._group, f"load from {self._root}", lambda: self._choose(count))[0]
        what = f"load step {chosen} from {self._root}"
        digests = together(self._group, what, lambda: self._prepare(chosen))
        if len(set(digests)) > 1:
            raise MismatchError(
                f"could not {what}: the ranks see different manifests. Remedy: a folder they all "
                "share"
            )
        together(self._group, what, self._read)
        assert self._state is not None and self._manifest is not None
        return Restored(self._state, self._manifest.user)

    def _choose(self, count: int | None) -> int:
        """The step to load; rank 0's word counts."""
        if self._group.rank != 0:
            return -1
        found = latest(self._root) if count is None else count
        counts = counts_in(self._root)
        if found is None or found not in counts:
            which = "no complete checkpoint" if count is None else f"no checkpoint of step {count}"
            raise CheckpointError(
                f"there is {which}; steps found: {', '.join(map(str, counts[-10:])) or 'none'}"
            )
        return found

    def _prepare(self, count: int) -> str:
        """Check all that can be checked before a tensor is written to."""
        self._manifest = check_sizes(self._root, count)
        self._old = contents_of(self._step, self._like)
        optimizer = unsharded_of(self._step).optimizer
        check_match(self._old, self._manifest, self._allowed, repr(optimizer))
        return hashlib.sha256(encode_manifest(self._manifest)).hexdigest()

    def _read(self) -> None:
        manifest, reuse = (
            self._manifest,
            isinstance(self._step, ShardedTrainStep) and self._step.options.donate,
        )
        assert manifest is not None and self._old is not None
        state = blank_state(self._like, reuse=reuse)
        if reuse and self._like.sharding is not None:
            self._like.sharding.donations.take(self._like.step)
        tensors = [leaf for leaf in optree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        new = [
            before._replace(tensor=tensor)
            for before, tensor in zip(self._old.held, tensors, strict=True)
        ]
        known = {leaf.path: n for n, leaf in enumerate(manifest.leaves)}
        wanted: dict[int, list[Wanted]] = {}
        pieces = _pieces_by_leaf(manifest)
        more_rows: list[tuple[Tensor, Tensor]] = []  # (a row, what is to be added to it)
        for before, held in zip(self._old.held, new, strict=True):
            if held.path in known:
                number = known[held.path]
                leaf = manifest.leaves[number]
                own, *others = _rows(held, leaf) if held.summed else [held]
                more_rows += [(held.tensor, other.tensor) for other in others]
                for part in (own, *others):
                    for n, run in _runs(part, leaf, pieces[number]):
                        wanted.setdefault(n, []).append(run)
            elif held.tensor is not before.tensor:
                held.tensor.copy_(before.tensor)
        folder = step_folder(self._root, manifest.step)
        for n, runs in sorted(wanted.items()):
            read_wanted(folder, manifest.files[n], manifest, runs)
        for row, other in more_rows:
            row.add_(other)
        self._state = _finished(state, self._old._replace(held=new), manifest)


def check_match(contents: Contents, manifest: Manifest, allowed: Allowed, optimizer: str) -> None:
    """Raise `StructureError`, naming leaves, unless a checkpoint fits a state as far as is asked.

    Args:
        optimizer: the present one, as it prints.
    """
    saved = {leaf.path: leaf for leaf in manifest.leaves}
    have = {*saved, *manifest.values}
    want = {*(h.path for h in contents.held), *contents.values}
    problems = []
    if want - have and not allowed.missing:
        problems.append(
            f"the checkpoint lacks {_some(want - have)} (allow_missing=True keeps `like`'s values)"
        )
    if have - want and not allowed.extra:
        problems.append(
            f"the checkpoint has {_some(have - want)}, which `like` lacks (allow_extra=True "
            "leaves it out)"
        )
    for held in contents.held:
        if held.path in saved:
            problems += _misfits(held, saved[held.path], allowed)
        elif held.path in manifest.values:
            problems.append(f"{held.path} is a tensor here, a number in the checkpoint")
    problems += [
        f"{path} is a tensor in the checkpoint, a number here"
        for path in contents.values
        if path in saved
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        optimizers = ""
        if manifest.optimizer not in (None, optimizer):
            optimizers = f". Its optimizer was {manifest.optimizer}, the present one is {optimizer}"
        raise StructureError(
            "the checkpoint is of another model, optimizer or dtype: "
            + "; ".join(problems[:5])
            + more
            + optimizers
        )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _misfits(held: Held, leaf: Leaf, allowed: Allowed) -> list[str]:
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


def _pieces_by_leaf(manifest: Manifest) -> list[list[tuple[int, Piece]]]:
    """For each leaf, its pieces and the numbers of their files."""
    table: list[list[tuple[int, Piece]]] = [[] for _ in manifest.leaves]
    for n, file in enumerate(manifest.files):
        for piece in file.pieces:
            table[piece.leaf].append((n, piece))
    return table


def _rows(held: Held, leaf: Leaf) -> list[Held]:
    """The rows of a saved leaf that this rank is to add up, the first in place: every N-th on N
    ranks. Zeros where there are fewer."""
    held.tensor.zero_()
    n, (num_rows, *_) = held.tensor.numel(), held.shape
    if not n:
        return [held]
    rows = [
        held._replace(tensor=torch.empty_like(held.tensor), start=row * n, stop=(row + 1) * n)
        for row in range(held.start // n, leaf.shape[0], num_rows)
    ]
    if not rows:
        return [held._replace(start=0, stop=0)]
    return [rows[0]._replace(tensor=held.tensor), *rows[1:]]


def _runs(
    held: Held, leaf: Leaf, pieces: Iterable[tuple[int, Piece]]
) -> Iterator[tuple[int, Wanted]]:
    """What to read for one leaf, and from which files."""
    target = held.tensor.detach().view(-1)
    for file, piece in pieces:
        start, stop = max(held.start, piece.start), min(held.stop, piece.start + piece.numel)
        if start < stop:
            offset = piece.offset + (start - piece.start) * leaf.width
            yield file, Wanted(offset, stop - start, leaf.dtype, target, start - held.start)


def _finished(state: State, contents: Contents, manifest: Manifest) -> State:
    """The state with what isn't in a file: values that are no tensors, and the order in which dims
    lie."""
    held = {h.path: h for h in contents.held}
    new: dict[str, Any] = {
        path: value for path, value in manifest.values.items() if path in contents.values
    }
    for leaf in manifest.leaves:
        if (
            leaf.order is not None
            and leaf.path in held
            and held[leaf.path].tensor.shape == leaf.shape
        ):
            new[leaf.path] = in_order(held[leaf.path].tensor, leaf.order)
    leaves, treedef = optree.tree_flatten(state)
    made: State = treedef.unflatten(
        new.get(path, leaf) for path, leaf in zip(paths(state), leaves, strict=True)
    )
    return made


def blank_state(like: State, *, reuse: bool) -> State:
    """A state of the same structure whose values are to be overwritten, all of them.

    Leaves that are views of one flat are so again. With `reuse` they are `like`'s own tensors, but
    for scalars (the step counter tells states apart), for leaves that don't lie row by row, and for
    a second use of the same storage.
    """
    leaves, treedef = optree.tree_flatten(like)
    flats: dict[int, Tensor] = {}  # by the id of the one that like's leaves are views of
    used: set[int] = set()
    made = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            made.append(leaf)
        elif reuse and leaf.dim() and leaf.is_contiguous() and leaf.data_ptr() not in used:
            used.update([leaf.data_ptr()] if leaf.numel() else [])
            made.append(leaf)
        else:
            made.append(_blank(leaf, flats))
    state: State = treedef.unflatten(made)
    return state


def _blank(leaf: Tensor, flats: dict[int, Tensor]) -> Tensor:
    base = base_of(leaf)
    if (
        base is None
        or not (leaf.is_contiguous() and base.is_contiguous())
        or base.dtype != leaf.dtype
    ):
        new = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    else:
        if id(base) not in flats:
            flats[id(base)] = torch.zeros(base.shape, dtype=base.dtype, device=base.device)
        new = flats[id(base)].as_strided(
            leaf.shape, leaf.stride(), leaf.storage_offset() - base.storage_offset()
        )
    return new.requires_grad_() if leaf.requires_grad else new


def in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A copy whose dims lie in memory in this order, from the slowest to the fastest."""
    copy = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
