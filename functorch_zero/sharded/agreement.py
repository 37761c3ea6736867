"""Agreement of ranks: at `init` on models, optimizers, options and values; in each step on metrics,
weights, flags and a digest of the collectives that each has started.

Note [equal copies]: ranks of the same data must find the same loss, metrics and weight, to the bit.
The first copy of each part of the batch sends a digest of them under one number, the other copies
under another. Where all are equal, so are the two means. Each digest is of the part's number, too,
so that parts that changed places don't cancel.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import GroupError, MismatchError
from ..groups.mesh import ONLY_COPY, Copy
from ..groups.protocol import Group
from ..layout.flat_buffers import cut
from ..layout.layout import Layout
from ..step.loss import as_metric
from ..step.nonfinite import not_finite, refusal
from ..step.weights import check_total_weight

# Compared by identity: it says that no metric lies on an accelerator
_CPU = torch.device("cpu")
# The vector's length is a multiple of this, so that ranks whose metrics differ still send equal
# lengths, and learn of it instead of hanging
_WIDTH = 32
_NUM_DIGESTS = 2**20  # so that the square of a digest, summed over 2**12 ranks, is exact in float64


class Report(NamedTuple):
    """The findings of all ranks together, the same on each."""

    metrics: dict[str, Tensor]  # weighted means over ranks, 0-d
    weight: Tensor  # 0-d float64, the sum of the weights of the batch's parts
    num_weighty: int  # parts whose weight isn't 0
    flags: list[bool]  # per flag: whether any rank has raised it
    mean_size: float | None  # of the ranks' batches, where they differ in it


def average(
    metrics: Mapping[str, Tensor | float],
    weight: Tensor | float | None,
    group: Group,
    log: Sequence[str] = (),
    flags: Sequence[bool | Tensor] = (),
    copy: Copy = ONLY_COPY,
    size: int = 0,
) -> Report:
    """The metrics' weighted mean over ranks, the sum of the weights, any rank's flags. One
    all-reduce of a few float64. Copies of the same data count as one.

    Raises `StructureError` on a rank whose weight is negative, or not finite.
    Raises `GroupError` on every rank when ranks report other metrics, or have started other
    collectives.
    Raises `MismatchError` on every rank when ranks of the same data have found other values.

    Args:
        metrics: this rank's, by name; 0-d tensors on any device, or numbers.
        weight: of this rank's part of the batch, 0-d, the sum of its micro-batches'; None: all
            parts count the same.
        log: the step, and the collectives that this rank has started since.
        flags: this rank's, a 0-d bool tensor where a device knows; any one rank raises a flag for
            all.
        copy: which copy of which part of the batch this rank has.
        size: of this rank's batch, for the ranks to compare.
    """
    values = {name: as_metric(value) for name, value in metrics.items()}  # 0-d, floating-point
    asked = [*values.values(), *(flag for flag in flags if isinstance(flag, Tensor))]
    # An accelerator's, if any value lies on one: its group may take no message from the CPU
    device = next((value.device for value in asked if not value.is_cpu), _CPU)
    told = iter(_on_host(asked, device))
    numbers = list(islice(told, len(values)))
    raised = [next(told) if isinstance(flag, Tensor) else flag for flag in flags]
    own_weight = 1.0 if weight is None else float(weight)  # Python's, a float64
    # Here the host knows a device's, too; an error on one rank becomes one on all
    check_total_weight(own_weight, group.rank)
    # A batch that weighs nothing counts for nothing, even if its metric is NaN, a mean of nothing
    weighted = [number * own_weight if own_weight else 0.0 for number in numbers]
    found = dict(zip(values, numbers, strict=True))  # unweighted, for comparing copies
    found["weight of its batch"] = own_weight

    kind = f"{len(flags)} flags, {'no' if weight is None else 'a'} weight"
    # Names in their order, since sums are matched by position. A mistake is caught, no attack.
    digest = zlib.crc32("\n".join([*values, kind, *log]).encode()) % _NUM_DIGESTS
    size_digest = size % _NUM_DIGESTS
    # Sections of fixed length come first, so that digests meet digests even where metrics differ
    sections: list[Sequence[float]] = [
        [own_weight, own_weight != 0],
        [digest, digest**2],
        [size, size_digest, size_digest**2],
        weighted,
        _of_copies(copy, found),
        raised,
    ]
    # (multiple of _WIDTH,) float64: counts below 2**53 are exact, and so are digests
    vector = _pack(sections, device)
    group.all_reduce(vector).wait()
    weights, digests, sizes, sums, of_copies, flag_counts = _unpack(vector, sections)

    # The other sections are read only once the ranks are known to have sent the same ones
    _check(digests, group, log)
    _check_copies(of_copies, copy, found, group)
    # Copies count `copy.num` times in sums and weights alike, which a mean doesn't show
    total_weight, num_weighty = weights
    means = {}
    for (name, value), total in zip(values.items(), sums, strict=True):
        # Where no batch weighs anything the sums are 0
        mean = total / total_weight if total_weight else total
        means[name] = torch.tensor(mean, dtype=value.dtype, device=device)
    mean_size = None
    if not _all_equal(sizes[1:], group.size):
        mean_size = sizes[0] / group.size
    return Report(
        metrics=means,
        weight=vector[0] / copy.num,  # stays on the device, where gradients are divided by it
        num_weighty=int(num_weighty) // copy.num,
        flags=[count > 0 for count in flag_counts],
        mean_size=mean_size,
    )


def _on_host(values: Sequence[Tensor], device: torch.device) -> list[float]:
    """The values of 0-d tensors. An accelerator is waited for once, not per value."""
    if device is _CPU:
        return [value.item() for value in values]
    return torch.stack([value.to(device, torch.float64) for value in values]).tolist()


def _pack(sections: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """The sections one after the other, and zeros: (a multiple of _WIDTH,) float64."""
    entries = [entry for section in sections for entry in section]
    # Rounded up to the width
    num_zeros = -len(entries) % _WIDTH
    return torch.tensor([*entries, *[0.0] * num_zeros], dtype=torch.float64, device=device)


def _unpack(vector: Tensor, sections: Sequence[Sequence[float]]) -> list[list[float]]:
    """The vector's numbers, section by section. An accelerator is waited for once."""
    numbers = iter(vector.tolist())
    return [list(islice(numbers, len(section))) for section in sections]


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


def _check(digests: Sequence[float], group: Group, log: Sequence[str]) -> None:
    """Raise, on every rank, unless all ranks' digests are equal.

    Args:
        digests: summed over ranks, and their squares summed over ranks.
    """
    if _all_equal(digests, group.size):
        return
    # A rank knows only its own log: each tells where it was
    at = log[0] if log else "none"
    started = log[1:]
    last = ", ".join(started[-4:]) or "none"
    raise GroupError(
        "the ranks are at different steps, have not started the same collectives, or report "
        f"other metrics; rank {group.rank} was at {at} and started {len(started)}, the last ones: "
        f"{last}. Their results are wrong, and the step is undone. Remedy: make every rank take "
        "the same steps, call the same units in the same order, return the same metrics, and give "
        "a weight on all ranks or on none"
    )


def _all_equal(sums: Sequence[float], num_ranks: int) -> bool:
    """Whether the ranks' integers are equal: (their sum, the sum of their squares). By Cauchy and
    Schwarz."""
    # Exact in float64; as Python's own they can't overflow
    total, squares = map(int, sums)
    return total * total == squares * num_ranks


def _of_copies(copy: Copy, found: Mapping[str, float]) -> list[float]:
    """A rank's entries for the comparison of copies; see Note [equal copies]. None where there are
    no copies.

    Summed over ranks: the numbers of first and of other copies, and their digests.
    """
    if copy.num == 1:
        return []
    # Below 2**32: float64 adds those of 2**21 ranks exactly
    digest = zlib.crc32(f"{copy.data}: {_bits(found)}".encode())
    if copy.number == 0:
        return [1, 0, digest, 0]
    return [0, 1, 0, digest]


def _check_copies(
    sums: Sequence[float], copy: Copy, found: Mapping[str, float], group: Group
) -> None:
    """Raise, on every rank with the same words, unless the copies are equal. Where they aren't, one
    more exchange of JSON finds the first difference."""
    # Every rank has data of its own
    if not sums:
        return
    num_first, num_others, first, others = map(int, sums)
    # The means of the first and of the other copies, multiplied out: digests are integers
    if first * num_others == others * num_first:
        return
    told = group.exchange(json.dumps([copy.data, found]).encode())
    # All ranks have all messages, and find the same first difference
    holders: dict[int, tuple[int, dict[str, float]]] = {}  # by part: first rank, and its findings
    for rank, message in enumerate(told):
        part, theirs = json.loads(message)
        other, expected = holders.setdefault(part, (rank, theirs))
        for name, ours, mine in zip(theirs, _bits(expected), _bits(theirs), strict=True):
            if ours == mine:
                continue
            raise MismatchError(
                f"ranks {other} and {rank} should have the same data, part {part} of the batch, "
                f"and found another {name}: {expected[name]!r} and {theirs[name]!r} (this is rank "
                f"{group.rank}). Remedy: give each rank part `mesh.data.rank` of the batch, and "
                "let the loss draw its random numbers from the state's seed alone"
            )
    raise AssertionError("the sums differ, and the values don't")


def _bits(found: Mapping[str, float]) -> list[str]:
    """Equal for values that are equal to the bit: NaN equals NaN, and -0.0 differs from 0.0."""
    return [float(number).hex() for number in found.values()]


def agree_on_results(
    step: int,
    metrics: Mapping[str, Tensor],
    rest: Mapping[str, str],
    group: Group,
    *,
    operations: Sequence[str],
    num_draws: int,
    failed: bool,
) -> bool:
    """Raise, on every rank, unless all ranks' results of a program are equal to the bit. Returns
    whether any rank has `failed`. One all-reduce of three float64; only when results differ, an
    exchange of JSON.

    Args:
        step: its number.
        metrics: by name, 0-d.
        rest: by path, digests of the leaves of the value that every rank holds whole.
        operations: of the program on parts of leaves, where it was watched.
        num_draws: of `fz.random`.
        failed: whether a background task of this rank has.
    """
    # Causes before their effects
    found = {f"operation {i} on parts of leaves": told for i, told in enumerate(operations, 1)}
    found |= {f"metric {name!r}": float(value).hex() for name, value in metrics.items()}
    found |= {f"leaf {path!r}": digest for path, digest in rest.items()}
    found["the number of draws of fz.random"] = str(num_draws)
    log = f"step {step}", *found.items()
    digest = zlib.crc32(repr(log).encode()) % _NUM_DIGESTS
    sums = torch.tensor([digest, digest**2, failed], dtype=torch.float64, device="cpu")
    group.all_reduce(sums).wait()
    *digests, num_failed = sums.tolist()
    if _all_equal(digests, group.size):
        return bool(num_failed > 0)
    everyone = [json.loads(told) for told in group.exchange(json.dumps([step, found]).encode())]
    steps = [told[0] for told in everyone]
    if len(set(steps)) > 1:
        raise GroupError(
            f"the ranks are at different steps: {steps}, in the order of ranks. Remedy: make every "
            "rank take the same steps"
        )
    first = everyone[0][1]
    rank, theirs = next((rank, told[1]) for rank, told in enumerate(everyone) if told[1] != first)
    name, ours, other = first_difference(first, theirs)
    raise MismatchError(
        f"the program's results differ between ranks: {name} is {_short(ours)} on rank 0 and "
        f"{_short(other)} on rank {rank} (this is rank {group.rank}). Remedy: make of each rank's "
        "own batch only what fz.value_and_grad gives, a loss and Aux(metrics=...), which are means "
        "over ranks"
    )


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
