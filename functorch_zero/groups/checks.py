"""The checks of every group's arguments, and the words in which groups report failures.

The checks are local and come before any communication. A rank that gets an argument wrong raises,
and the others hear of it as of any other failure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import check_choice
from ..tree import grouped, is_flagged
from .protocol import ReduceOp


def check_flat(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that isn't 1-D and contiguous: a collective moves its memory as it lies.

    A lazily conjugated or negated one has other values than lie there.
    """
    if tensor.dim() == 1 and tensor.is_contiguous() and not is_flagged(tensor):
        return
    got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    if is_flagged(tensor):
        got += ", lazily conjugated or negated"
    raise ValueError(
        f"{name} must be 1-D and contiguous, got {got}. Remedy: pass a contiguous view of one dim, "
        "as from .contiguous().view(-1), after .resolve_conj().resolve_neg()."
    )


def check_call(size: int, kind: str, *arguments: Any) -> None:
    """Raise unless a group of so many ranks can make this collective of these arguments.

    Only an all-to-all itself can tell that its sizes fit the other ranks'.
    """
    match kind, arguments:
        case "all_gather", (out, piece):
            _check_pieces(size, "out", out, "piece", piece)
        case "reduce_scatter", (out, whole):
            _check_pieces(size, "whole", whole, "out", out)
            _check_reducible("sum", whole)
        case "all_reduce", (tensor, op):
            check_flat("tensor", tensor)
            _check_reducible(op, tensor)
        case "all_to_all", (out, out_sizes, source, in_sizes):
            _check_alike("out", out, "source", source)
            _check_runs(size, "out_sizes", out_sizes, "out", out)
            _check_runs(size, "in_sizes", in_sizes, "source", source)
        case "broadcast", (tensor, source):
            check_flat("tensor", tensor)
            check_source(size, source)


def check_source(size: int, source: int) -> None:
    """Raise unless a broadcast's source is a rank of the group."""
    if 0 <= source < size:
        return
    raise ValueError(f"source must be a rank of the group, from 0 to {size - 1}, got {source}")


def check_subgroup(rank: int, size: int, ranks: Sequence[int]) -> None:
    """Raise unless these ranks may form a group: some of `size`, in order, `rank` among them.

    A group asks this before its ranks meet: a wrong list must not make them wait for each other.
    """
    # Strictly increasing, or sorting and de-duplicating would change it
    in_order = list(ranks) == sorted(set(ranks))
    exist = set(ranks) <= set(range(size))
    if in_order and exist and rank in ranks:
        return
    raise ValueError(
        f"ranks must be some of 0 to {size - 1} in increasing order, and {rank}, this one, among "
        f"them; got {list(ranks)}"
    )


def failure_text(rank: int, error: BaseException) -> str:
    """The message to the other ranks when `rank` fails: "rank 2 failed: ValueError: bad batch"."""
    text = f"rank {rank} failed: {type(error).__name__}"
    words = str(error)
    return f"{text}: {words}" if words else text


def ranks_text(ranks: Collection[int]) -> str:
    """'rank 1', or 'ranks 0, 2'."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"{noun} {numbers}"


def by_rank(texts: Iterable[str]) -> str:
    """A text of each rank, in rank order: 'rank 0: text; ranks 1, 2: other text'."""
    ranks = grouped((text, rank) for rank, text in enumerate(texts))
    return "; ".join(f"{ranks_text(same)}: {text}" for text, same in ranks.items() if text)


def fold(rows: Sequence[Tensor], op: str) -> Tensor:
    """The sum or the maximum of tensors, in their order, as a new one; NaN stays NaN in both."""
    total = rows[0].clone()  # of the tensors' shape and dtype
    for row in rows[1:]:
        # In rank order, so that every rank gets the same bits
        if op == "sum":
            total += row
        else:
            total.copy_(total.maximum(row))  # `maximum` keeps NaN, as `max` of backends may not
    return total


def _check_reducible(op: str, tensor: Tensor) -> None:
    """Refuse operations and dtypes that backends do not all reduce in the same way."""
    check_choice("op", op, get_args(ReduceOp))
    if tensor.dtype == torch.bool:
        raise TypeError("a bool tensor can't be reduced: convert it to an integer dtype first")


def _check_pieces(size: int, long_name: str, long: Tensor, short_name: str, short: Tensor) -> None:
    """Raise unless one tensor has `size` times the elements of the other, and they are of one dtype
    and device."""
    _check_alike(long_name, long, short_name, short)
    num_long, num_short = long.numel(), short.numel()
    if num_long == size * num_short:
        return
    raise ValueError(
        f"{long_name} must have {size} times (once per rank) the {num_short} elements of "
        f"{short_name}, got {num_long}"
    )


def _check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless both tensors are flat, and of one dtype and device."""
    check_flat(name, tensor)
    check_flat(other_name, other)
    if tensor.dtype == other.dtype and tensor.device == other.device:
        return
    kind = f"{tensor.dtype} on {tensor.device}"
    other_kind = f"{other.dtype} on {other.device}"
    raise ValueError(
        f"{name} and {other_name} must have one dtype and device, got {kind} and {other_kind}"
    )


def _check_runs(
    size: int, sizes_name: str, sizes: Sequence[int], name: str, tensor: Tensor
) -> None:
    """Raise unless the sizes are one per rank, and those of runs that make up the tensor."""
    expected = tensor.numel()
    # The lengths first: `sum` alone would let a wrong number of runs pass
    if len(sizes) == size and min(sizes) >= 0 and sum(sizes) == expected:
        return
    raise ValueError(
        f"{sizes_name} must be {size} counts (one per rank) that sum to the {expected} elements of "
        f"{name}, got {list(sizes)}"
    )
