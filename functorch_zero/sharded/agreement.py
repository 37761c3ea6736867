"""Agreement of ranks: at `init` on models, optimizers, options and values; in each step on a digest
of what each has done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import GroupError, MismatchError
from ..groups.protocol import Group
from ..layout.flat_buffers import cut
from ..layout.layout import Layout
from ..step.nonfinite import not_finite, refusal

# Lengths of messages are multiples of this, so that ranks that have more to say than others still
# send equal lengths, and learn of it instead of hanging
WIDTH = 32


class Told(NamedTuple):
    """The words of all ranks together, the same on each."""

    alike: bool  # whether the ranks' logs are equal
    flags: list[bool]  # per flag: whether any rank has raised it
    sizes: tuple[int, int] | None  # the smallest and the largest, where the ranks differ in it


def tell(log: Sequence[str], flags: Sequence[bool], group: Group, size: int = 0) -> Told:
    """Tell all ranks some words of this host, and learn theirs. One all-reduce of a few int64 on
    the CPU, which waits for the other hosts, and for no device.

    Args:
        log: the words that all ranks must have equal.
        flags: this rank's. Any one rank raises a flag for all.
        size: a number for the ranks to compare, from 0.
    """
    # Of 63 bits, so that it fits an int64 with either sign. A mistake is caught, no attack.
    words = "\n".join([f"{len(flags)} flags", *log]).encode()
    digest = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1
    # Of maxima alone: the largest of -x is minus the smallest of x
    entries = [digest, -digest, size, -size, *flags]
    # Digests meet digests even where ranks have other numbers of flags
    num_zeros = -len(entries) % WIDTH
    vector = torch.tensor([*entries, *[0] * num_zeros], dtype=torch.int64, device="cpu")
    group.all_reduce(vector, op="max").wait()
    most, least, largest, smallest, *raised = vector.tolist()
    return Told(
        alike=most == -least,
        flags=[bool(flag) for flag in raised[: len(flags)]],
        sizes=None if largest == -smallest else (-smallest, largest),
    )


def refuse(
    step: int,
    loss: Tensor,
    reduced: Mapping[int, Tensor],
    layout: Layout,
    piece_number: int,
    group: Group,
) -> NoReturn:
    """Raise, on every rank with the same words: which loss or gradient is not finite on which
    rank. One exchange of JSON.

    Args:
        step: its number.
        loss: this rank's, 0-d.
        reduced: the reduced gradients (piece,), by bucket.
        piece_number: of this rank's pieces in a bucket.
        group: all ranks; every one of them calls this.
    """
    # By path, this rank's gradients (n,)
    pieces: dict[str, Tensor] = {}
    for b, flat in reduced.items():
        bucket = layout.buckets[b]
        for n, piece in zip(bucket.leaves, cut(flat, bucket, piece_number), strict=True):
            pieces[layout.leaves[n].path] = piece
    found = not_finite(pieces)  # this rank's; another rank's pieces may be finite
    everyone = group.exchange(json.dumps([float(loss), found]).encode())
    raise refusal(step, [json.loads(data) for data in everyone])


def agree_on_results(
    step: int,
    calls: Sequence[str],
    found: Mapping[str, Any],
    group: Group,
    *,
    failed: bool,
) -> bool:
    """Raise, on every rank, unless all ranks have made the same calls in a program, and its results
    are equal to the bit. Returns whether any rank has `failed`. One all-reduce of words; only when
    ranks differ, an exchange of JSON.

    Args:
        step: its number.
        calls: of the library so far; see Note [calls of a program] in `library_calls`.
        found: the results as plain data, equal where values are equal to the bit; causes before
            their effects.
        failed: whether a background task of this rank has.
    """
    # Ranks at different calls of a step send equal lengths, since `tell` does
    words = [f"step {step}", f"{len(calls)} calls", *calls, *map(repr, found.items())]
    told = tell(words, [failed], group)
    if told.alike:
        return told.flags[0]
    messages = group.exchange(json.dumps([step, calls, found]).encode())
    everyone = [json.loads(message) for message in messages]
    steps = [message[0] for message in everyone]
    if len(set(steps)) > 1:
        raise GroupError(
            f"the ranks are at different steps: {steps}, in the order of ranks. Remedy: make every "
            "rank take the same steps"
        )
    _check_calls(step, [message[1] for message in everyone], group.rank)
    first = everyone[0][2]
    rank, theirs = next((rank, each[2]) for rank, each in enumerate(everyone) if each[2] != first)
    name, ours, other = first_difference(first, theirs)
    raise MismatchError(
        f"the program's results differ between ranks: {name} is {_short(ours)} on rank 0 and "
        f"{_short(other)} on rank {rank} (this is rank {group.rank}). Remedy: make of each rank's "
        "own batch only what fz.value_and_grad gives, a loss and Aux(metrics=...), which are means "
        "over ranks"
    )


def _check_calls(step: int, calls: Sequence[Sequence[str]], own_rank: int) -> None:
    """Raise `GroupError` unless all ranks, in their order, have made the same calls."""
    for rank, theirs in enumerate(calls):
        if theirs == calls[0]:
            continue
        # An end that comes sooner is a difference, too
        rows = enumerate(zip_longest(calls[0], theirs, fillvalue=_NO_CALL), start=1)
        number, (expected, other) = next((n, pair) for n, pair in rows if pair[0] != pair[1])
        raise GroupError(
            f"the ranks make different calls in step {step} of a program: call {number} is "
            f"{expected} on rank 0, and {other} on rank {rank} (this is rank {own_rank}). Remedy: "
            "make the same calls of the library on every rank, in the same order; branch on a "
            "number that is the same on all ranks, such as a metric that the loss gives by "
            "fz.Aux(metrics=...)"
        )


_NO_CALL = "missing"


def agree(group: Group, facts: dict[str, Any]) -> None:
    """Raise `MismatchError` on every rank, naming the first field that differs, unless all ranks
    give equal facts.

    One exchange of 32-byte digests. Only when they differ, a second one of the facts, as JSON.
    """
    # Keys are sorted, since equal dicts may differ in their order
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    if len(set(group.exchange(digest))) == 1:
        return
    # The keys in the order given: causes come before their effects
    everyone = [json.loads(message) for message in group.exchange(json.dumps(facts).encode())]
    first = everyone[0]
    # Two of the facts are enough to name: rank 0's, and the first that differ
    other = next(theirs for theirs in everyone if theirs != first)
    like_other = [rank for rank, theirs in enumerate(everyone) if theirs == other]
    field, ours, theirs = first_difference(first, other)
    raise MismatchError(
        f"the ranks were given different things: {field} is {_short(ours)} on rank 0 and "
        f"{_short(theirs)} on {_ranks(like_other)} (this is rank {group.rank}). Remedy: "
        f"{_remedy(field)}"
    )


def _remedy(field: str) -> str:
    if field.startswith("values"):
        return (
            "build the model from the same seed on every rank, or take one rank's values, "
            "fz.broadcast(params, group)"
        )
    return "build model, optimizer and options the same way on every rank"


class Difference(NamedTuple):
    """A field in which two pieces of plain data differ."""

    field: str  # dotted: "options.donate", "buffers[2]"
    ours: Any
    theirs: Any


def first_difference(ours: Any, theirs: Any, field: str = "") -> Difference:
    """The first field in which two pieces of plain data, which are not equal, differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if len(ours) == len(theirs) == 1 and ours.keys() != theirs.keys():
            # Two things by name, adamw and sgd say, rather than fields of one
            return Difference(field, ours, theirs)
        for key in dict.fromkeys([*ours, *theirs]):
            a, b = ours.get(key, _Absent), theirs.get(key, _Absent)
            if a != b:
                return first_difference(a, b, f"{field}.{key}".lstrip("."))
    # A shape is told whole
    if isinstance(ours, list) and isinstance(theirs, list) and not _are_numbers(ours + theirs):
        # A list that is longer differs there, unless it differs before
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return first_difference(a, b, f"{field}[{i}]")
        if len(ours) != len(theirs):
            return Difference(f"the length of {field}", len(ours), len(theirs))
    return Difference(field, ours, theirs)


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


class _Absent:
    """Stands for a field that one side does not have."""


def _short(value: Any) -> str:
    if value is _Absent:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _ranks(numbers: list[int]) -> str:
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, numbers))}"
