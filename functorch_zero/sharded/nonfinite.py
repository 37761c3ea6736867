"""The refusal of a loss or gradient that is not finite, with the findings of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from ..groups.protocol import Group
from ..layout.extent import Rows
from ..layout.flat_buffers import cut
from ..layout.layout import Layout
from ..step.nonfinite import not_finite, refusal
from .words import exchange_data


def refuse(
    what: str,
    loss: Tensor,
    reduced: Mapping[int, Tensor | Rows],
    layout: Layout,
    piece_number: int,
    group: Group,
) -> NoReturn:
    """Raise, on every rank with the same words: which loss or gradient is not finite on which
    rank. One exchange of JSON.

    Args:
        what: the step, or a gradient outside of one.
        loss: this rank's, 0-d.
        reduced: the reduced gradients (piece,), by bucket.
        piece_number: of this rank's pieces in a bucket.
        group: all ranks; every one of them calls this.
    """
    # By path, this rank's gradients (n,)
    pieces: dict[str, Tensor] = {}
    for b, flat in reduced.items():
        bucket = layout.buckets[b]
        # Of a table, the rows of its one leaf
        own = [flat.values] if isinstance(flat, Rows) else cut(flat, bucket, piece_number)
        for n, piece in zip(bucket.leaves, own, strict=True):
            pieces[layout.leaves[n].path] = piece
    found = not_finite(pieces)  # this rank's; another rank's pieces may be finite
    raise refusal(what, exchange_data(group, [float(loss), found]))
