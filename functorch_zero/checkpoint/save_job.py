"""One save: every rank writes its file, then rank 0 the manifest, and the folder gets its name."""

from __future__ import annotations

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
from .agreement import together
from .block_io import BLOCK, CHECKSUM, write_rank_file
from .contents import digest_of
from .files import Temporary, step_folder, write_file
from .manifest import NAME, File, Leaf, Manifest, Piece, check_coverage, encode_manifest, file_name
from .safetensors_file import dtype_name
from .snapshot import Snapshot

log = logging.getLogger("functorch_zero.checkpoint")


class SaveJob:
    """A save, on one rank.

    Args:
        root: the folder of checkpoints.
        group: the ranks, each of which runs the same job.
        take: makes the snapshot, or raises why there is none.
    """

    def __init__(self, root: Path, group: Group, take: Callable[[], Snapshot]) -> None:
        self._root, self._group, self._take = root, group, take
        self._temporary: Temporary | None = None  # on rank 0
        self._snapshot: Snapshot | None = None

    def run(self) -> Path:
        """Save, and return the folder. Three exchanges."""
        started = time.monotonic()
        try:
            begun = together(self._group, f"save to {self._root}", self._begin)
            _check_agreement(begun)
            what = f"save step {begun[0]['step']} to {self._root}"
            rows = together(self._group, what, lambda: self._write(Path(begun[0]["folder"])))
            together(self._group, what, lambda: self._commit(rows))
        finally:
            self._snapshot = None
            if self._temporary is not None:
                self._temporary.discard()
        target = step_folder(self._root, begun[0]["step"])
        if self._group.rank == 0:
            size = sum(row["file"][1] for row in rows)
            log.info("saved %s: %.1f MB in %.1f s", target, size / 1e6, time.monotonic() - started)
        return target

    def _begin(self) -> dict[str, Any]:
        self._snapshot = snapshot = self._take()
        folder = ""
        if self._group.rank == 0:
            self._temporary = Temporary(step_folder(self._root.absolute(), snapshot.step))
            folder = str(self._temporary.path)
        digest = digest_of(snapshot.contents, snapshot.level, json.dumps(snapshot.user))
        return {"step": snapshot.step, "folder": folder, "digest": digest}

    def _write(self, folder: Path) -> dict[str, Any]:
        assert self._snapshot is not None
        file = write_rank_file(
            folder / file_name(self._group.rank, self._group.size), self._snapshot
        )
        self._snapshot.check_unchanged()
        return {"file": file, "orders": self._orders()}

    def _orders(self) -> list[tuple[int, tuple[int, ...]]]:
        """How leaves lie in memory that don't lie row by row, by number: kernels may round
        differently on them."""
        assert self._snapshot is not None
        orders = (
            (i, order_of(h.tensor)) for i, h in enumerate(self._snapshot.contents.held) if h.whole
        )
        return [(i, order) for i, order in orders if order is not None]

    def _commit(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._temporary is None:
            return
        assert self._snapshot is not None
        manifest = _manifest(self._snapshot, rows)
        check_coverage(manifest.leaves, manifest.files, "what the ranks have written")
        write_file(self._temporary.path / NAME, encode_manifest(manifest))
        self._temporary.commit()


def _check_agreement(begun: Sequence[dict[str, Any]]) -> None:
    steps = [row["step"] for row in begun]
    if len(set(steps)) > 1:
        raise MismatchError(
            f"the ranks are at different steps, and can't save one checkpoint: {steps} in rank "
            "order"
        )
    other = next(
        (rank for rank, row in enumerate(begun) if row["digest"] != begun[0]["digest"]), None
    )
    if other is not None:
        raise MismatchError(
            f"ranks 0 and {other} save states with different leaves, numbers or `user`. Remedy: "
            "gather what differs by rank into one value that all ranks pass"
        )


def _manifest(snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> Manifest:
    orders = {i: tuple(order) for row in rows for i, order in row["orders"]}
    leaves = tuple(
        Leaf(h.path, dtype_name(h.path, h.tensor.dtype), h.shape, orders.get(i))
        for i, h in enumerate(snapshot.contents.held)
    )
    files = tuple(
        File(name, size, sums, tuple(Piece(*piece) for piece in pieces))
        for name, size, sums, pieces in (row["file"] for row in rows)
    )
    return Manifest(
        step=snapshot.step,
        ranks=len(files),
        level=snapshot.level,
        block=BLOCK,
        checksum=CHECKSUM,
        leaves=leaves,
        values=snapshot.contents.values,
        files=files,
        user=snapshot.user,
        about=snapshot.about,
    )


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dims of a dense tensor from the slowest to the fastest in memory; None when it lies row
    by row."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    strides = list(tensor.stride())
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
