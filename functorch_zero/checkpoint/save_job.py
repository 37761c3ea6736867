"""One save: every rank writes its file, then rank 0 the manifest, and the folder gets its name."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MismatchError
from ..groups.protocol import Group
from ..sharded.agreement import difference_in_words
from .agreement import together
from .block_io import BLOCK, CHECKSUM, write_rank_file
from .contents import LocalLeaf
from .errors import CheckpointError
from .files import Temporary, step_folder, write_file
from .frozen import crc_shares, crcs_from
from .manifest import (
    MAX_BYTES,
    NAME,
    File,
    Leaf,
    LeftOut,
    Manifest,
    encode_manifest,
    file_name,
    parse_manifest,
)
from .places import find_places
from .snapshot import Snapshot

log = logging.getLogger("functorch_zero.checkpoint")


def run_save(root: Path, group: Group, take: Callable[[], Snapshot]) -> Path:
    """Save on all ranks, each of which calls this, and return the folder. Three exchanges.

    Args:
        root: the folder of checkpoints.
        group: the ranks.
        take: makes this rank's snapshot, or raises why there is none.
    """
    started = time.monotonic()
    snapshot: Any = None
    temporary: Temporary | None = None  # on rank 0, which makes the folder

    def begin() -> dict[str, Any]:
        """This rank's snapshot, and facts that ranks compare; rank 0 gives the folder."""
        nonlocal snapshot, temporary
        snapshot = take()
        if group.rank == 0:
            _check_size(snapshot)
            # Absolute, since other ranks may run in another folder
            temporary = Temporary(step_folder(root.absolute(), snapshot.step))
        # `user` in one text, since a million numbers in texts of their own take a second
        facts = _facts(root, snapshot, json.dumps(snapshot.user, sort_keys=True))
        return {
            "step": snapshot.step,
            "folder": "" if temporary is None else str(temporary.path),
            "digest": hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        }

    def commit() -> None:
        if temporary is not None:
            _write_manifest(snapshot, temporary.path, told)
            temporary.commit()

    try:
        # Snapshots, and rank 0's folder: rank 0 alone makes and names it
        what = f"save to {root}"
        begun = together(group, what, begin).of_all
        if any(row["digest"] != begun[0]["digest"] for row in begun):
            # By the name, which is let go of below: an argument that is bound would stay
            facts = together(
                group, what, lambda: _facts(root, snapshot, _in_texts(snapshot.user))
            ).of_all
            _, difference = difference_in_words(facts)
            raise MismatchError(
                f"the ranks save different things: {difference} (this is rank {group.rank}). "
                "Remedy: pass one folder and one state on all ranks, and gather what else differs "
                "by rank into one value"
            )
        first = begun[0]
        what = f"save step {first['step']} to {root}"
        # Every rank's file is on disk before any rank goes on
        told = together(group, what, lambda: _write(snapshot, Path(first["folder"]), group)).of_all
        # The name comes last: until then the folder is nobody's checkpoint
        together(group, what, commit)
    finally:
        snapshot = None  # lets go of the state's tensors, which an error would hold
        if temporary is not None:  # after a commit there is nothing to discard
            temporary.discard()
    target = step_folder(root, first["step"])
    if group.rank == 0:
        size = sum(File(*one["file"]).size for one in told)
        log.info("saved %s: %.1f MB in %.1f s", target, size / 1e6, time.monotonic() - started)
    return target


def _facts(root: Path, snapshot: Snapshot, user: Any) -> dict[str, Any]:
    """Facts that all ranks have alike, with `user` in these words: not the elements, of which each
    has its own."""
    leaves, values = snapshot.contents
    return {
        # All write into rank 0's folder, so that another rank would look for it in vain
        "the folder": str(root),
        "the step": snapshot.step,
        "the level": str(snapshot.level),
        "leaves": list(map(_words, leaves)),
        "frozen leaves that are left out": list(map(_words, snapshot.left_out)),
        "numbers": [f"{path}: {value!r}" for path, value in values.items()],
        "user": user,
    }


def _write(snapshot: Snapshot, folder: Path, group: Group) -> dict[str, Any]:
    """Write this rank's file; its manifest entry, and what the manifest needs besides."""
    file = write_rank_file(folder / file_name(group.rank, group.size), snapshot)
    left_out = snapshot.left_out
    dtypes = [local.tensor.dtype for local in left_out]
    shares = crc_shares(left_out, dtypes, group.rank, group.size)
    # Written while it changed: an error now, and the folder is discarded
    snapshot.check_unchanged()
    # Every rank gets this from every rank: of fixed size, but for leaves that few have whole, and
    # frozen ones that are left out
    orders = list(orders_of(snapshot, everywhere=False).items())
    return {"file": file, "orders": orders, "shares": shares}


def _write_manifest(snapshot: Snapshot, folder: Path, told: Sequence[dict[str, Any]]) -> None:
    """On rank 0. `told`: of `_write`, in rank order."""
    orders = orders_of(snapshot, everywhere=True)
    for one in told:
        orders |= {number: tuple(order) for number, order in one["orders"]}
    crcs = crcs_from([one["shares"] for one in told], len(snapshot.left_out))
    manifest = _manifest(snapshot, [File(*one["file"]) for one in told], orders, crcs)
    data = encode_manifest(manifest)
    # What `load` would refuse shows here, before the checkpoint has a name
    find_places(parse_manifest(data, NAME), folder, manifest.everything)
    write_file(folder / NAME, data, MAX_BYTES)


def _check_size(snapshot: Snapshot) -> None:
    """Raise `CheckpointError` if `load` would refuse the manifest for its size, before anything is
    written. Ranks' files and orders of dims add a little to it."""
    size = len(encode_manifest(_manifest(snapshot, [], {}, [0] * len(snapshot.left_out))))
    if size > MAX_BYTES:
        user = len(json.dumps(snapshot.user, separators=(",", ":")))
        by_user = "write large data of your own into a file, and give `user` its name"
        raise CheckpointError(
            f"the manifest would have {size} bytes, {user} of them for `user`, and `load` reads no "
            f"more than {MAX_BYTES}. Remedy: "
            f"{by_user if user > size // 2 else 'stack leaves of one shape'}"
        )


def _words(local: LocalLeaf) -> str:
    return f"{local.path}: {local.tensor.dtype} of shape {tuple(local.shape)}"


def _in_texts(data: Any) -> Any:
    """Plain data whose numbers are texts, since Python takes 1 and 1.0 for equal."""
    if isinstance(data, list):
        return [_in_texts(x) for x in data]
    if isinstance(data, dict):
        return {key: _in_texts(data[key]) for key in sorted(data)}
    return json.dumps(data)


Orders = dict[int, tuple[int, ...]]  # of dims, by the leaf's number


def orders_of(snapshot: Snapshot, *, everywhere: bool) -> Orders:
    """The orders of dims of leaves that don't lie row by row in memory: those that every rank has
    whole, or those that this rank has whole and others haven't.

    A loaded leaf lies so again, since kernels may round differently on it. Ranks that hold only a
    piece of a leaf don't know its order, and those that hold it whole say the same.
    """
    orders = {}
    for number, local in enumerate(snapshot.contents.leaves):
        order = order_of(local.tensor) if local.whole and local.everywhere is everywhere else None
        if order is not None:
            orders[number] = order
    return orders


def _manifest(
    snapshot: Snapshot, files: Sequence[File], orders: Orders, crcs: Sequence[int]
) -> Manifest:
    """The manifest of all ranks' files, in rank order; `crcs` of the leaves that are left out."""
    leaves, left_out = snapshot.contents.leaves, zip(snapshot.left_out, crcs, strict=True)
    return Manifest(
        step=snapshot.step,
        ranks=len(files),
        level=snapshot.level,
        block=BLOCK,
        checksum=CHECKSUM,
        leaves=tuple(_leaf(h)._replace(order=orders.get(i)) for i, h in enumerate(leaves)),
        values=snapshot.contents.values,
        files=tuple(files),
        user=snapshot.user,
        about=snapshot.about,
        left_out=tuple(LeftOut(_leaf(h), crc) for h, crc in left_out),
    )


def _leaf(local: LocalLeaf) -> Leaf:
    return Leaf(local.path, local.tensor.dtype, local.shape)


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dims of a dense tensor from the slowest to the fastest in memory; None when it lies row
    by row."""
    # Overlapping or strided tensors have no such order: they are loaded row by row
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])  # stable
    return tuple(dims)
