"""What every group checks about its arguments, and the words in which it reports a failure.

These checks are local and come before any communication: a rank that gets one wrong raises, and the
others hear of it as of any other failure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor


def check_flat(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that isn't 1-D and contiguous: a collective moves its memory as it lies.

    A lazily conjugated or negated one has other values than lie there.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        is_lazy = tensor.is_conj() or tensor.is_neg()
        lazy = ", lazily conjugated or negated" if is_lazy else ""
        raise ValueError(
            f"{name} must be 1-D and contiguous, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}{lazy}. Remedy: pass a contiguous view of one dim, as from "
            ".contiguous().view(-1), after .resolve_conj().resolve_neg()."
        )


def check_all_gather(size: int, out: Tensor, piece: Tensor) -> None:
    _check_pieces(size, "out", out, "piece", piece)


def check_reduce_scatter(size: int, out: Tensor, whole: Tensor) -> None:
    _check_pieces(size, "whole", whole, "out", out)


def check_all_to_all(
    size: int, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
) -> None:
    _check_alike("out", out, "source", source)
    _check_runs(size, "out_sizes", out_sizes, "out", out)
    _check_runs(size, "in_sizes", in_sizes, "source", source)


def check_source(size: int, source: int) -> None:
    if not 0 <= source < size:
        raise ValueError(f"source must be a rank of the group, from 0 to {size - 1}, got {source}")


def check_subgroup(rank: int, size: int, ranks: Sequence[int]) -> None:
    if list(ranks) != sorted(set(ranks)) or rank not in ranks or not set(ranks) <= set(range(size)):
        raise ValueError(
            f"ranks must be some of 0 to {size - 1} in increasing order, and {rank}, this one, "
            f"among them; got {list(ranks)}"
        )


def failure_text(rank: int, error: BaseException) -> str:
    """What the other ranks are told when `rank` fails, as 'rank 2 failed: ValueError: bad
    batch'."""
    text = f"rank {rank} failed: {type(error).__name__}"
    return f"{text}: {error}" if str(error) else text


def ranks_text(ranks: Collection[int]) -> str:
    """'rank 1', or 'ranks 0, 2'."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def fold(parts: Sequence[Tensor], op: str) -> Tensor:
    """The sum or the maximum of `parts`, in their order, as a new tensor; NaN stays NaN in both."""
    total = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            total += part
        else:
            total.copy_(total.maximum(part))
    return total


def _check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    check_flat(name, tensor)
    check_flat(other_name, other)
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise ValueError(
            f"{name} and {other_name} must have one dtype and device, got {tensor.dtype} on "
            f"{tensor.device} and {other.dtype} on {other.device}"
        )


def _check_pieces(size: int, long_name: str, long: Tensor, short_name: str, short: Tensor) -> None:
    _check_alike(long_name, long, short_name, short)
    if long.numel() != size * short.numel():
        raise ValueError(
            f"{long_name} must have {size} times (once a rank) the {short.numel()} elements of "
            f"{short_name}, got {long.numel()}"
        )


def _check_runs(
    size: int, sizes_name: str, sizes: Sequence[int], name: str, tensor: Tensor
) -> None:
    if len(sizes) != size or min(sizes) < 0 or sum(sizes) != tensor.numel():
        raise ValueError(
            f"{sizes_name} must be {size} counts (one a rank) that sum to the {tensor.numel()} "
            f"elements of {name}, got {list(sizes)}"
        )
