"""Agreement of ranks: at `init` on what they were given, and in each step on metrics, weights,
flags and a digest of the collectives that each has started.

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

_CPU = torch.device("cpu")
# the vector's length is a multiple of it, so that ranks whose metrics differ still send equal
# lengths
_WIDTH = 32
_BITS = 20  # of a digest: its square, summed over 2**12 ranks, is exact in float64


class Report(NamedTuple):
    """The findings of all ranks together, the same on each."""

    metrics: dict[str, Tensor]  # weighted means over ranks
    weight: Tensor  # 0-d float64, the sum of the weights of the batch's parts
    num_weighty: int  # parts whose weight isn't 0
    flags: list[bool]  # which flags any rank has raised


def average(
    metrics: Mapping[str, Tensor | float],
    weight: Tensor | float | None,
    group: Group,
    log: Sequence[str] = (),
    flags: Sequence[bool] = (),
    copy: Copy = ONLY_COPY,
) -> Report:
    """The metrics' weighted mean over ranks, the sum of the weights, any rank's flags. One
    all-reduce of a few float64. Copies of the same data count as one.

    Raises `GroupError` on every rank when ranks report other metrics, or have started other
    collectives: sum(h**2) is sum(h)**2 / N only where all h are equal (Cauchy and Schwarz).
    Raises `MismatchError` on every rank when ranks of the same data have found other values.
    """
    values = {name: as_metric(value) for name, value in metrics.items()}
    device = next((v.device for v in values.values() if not v.is_cpu), _CPU)
    own = 1.0 if weight is None else float(as_metric(weight))
    kind = f"{len(flags)} flags, {'no' if weight is None else 'a'} weight"
    digest = zlib.crc32("\n".join([*values, kind, *log]).encode()) % 2**_BITS
    if device is _CPU:
        seen = [v.item() for v in values.values()]
    else:  # which is waited for once
        seen = torch.stack([v.to(device, torch.float64) for v in values.values()]).tolist()
    # What weighs nothing counts for nothing, a mean of nothing too
    weighted = [x * own if own else 0.0 for x in seen]
    found = dict(zip(values, seen, strict=True)) | {"weight of its batch": own}
    copies = _of_copies(copy, found)
    entries = [digest, digest**2, own, *weighted, own != 0, *copies, *flags]
    vector = torch.tensor(
        entries + [0.0] * (-len(entries) % _WIDTH), dtype=torch.float64, device=device
    )
    group.all_reduce(vector).wait()
    total, squares, weights, *rest = vector.tolist()[: len(entries)]
    sums, (num_weighty, *rest) = rest[: len(values)], rest[len(values) :]
    of_copies, counts = rest[: len(copies)], rest[len(copies) :]
    _check(int(total), int(squares), group, log)
    _check_copies(of_copies, copy, found, group)
    means = {
        name: torch.tensor(x / weights if weights else x, dtype=v.dtype, device=device)
        for (name, v), x in zip(values.items(), sums, strict=True)
    }
    raised = [count > 0 for count in counts]
    return Report(means, vector[2] / copy.num, int(num_weighty) // copy.num, raised)


def refuse(
    step: int, loss: Tensor, reduced: Mapping[int, Tensor], layout: Layout, rank: int, group: Group
) -> NoReturn:
    """Raise, on every rank with the same words, of what each has found that is not finite. One
    exchange of JSON.

    Args:
        loss: this rank's.
        reduced: the reduced gradients, by bucket; `rank` is this rank's number among their pieces.
    """
    pieces = {
        layout.leaves[n].path: piece
        for b, flat in reduced.items()
        for n, piece in zip(
            layout.buckets[b].leaves, cut(flat, layout.buckets[b], rank), strict=True
        )
    }
    found = not_finite(pieces)
    everyone = group.exchange(json.dumps([float(loss), found]).encode())
    raise refusal(step, [json.loads(data) for data in everyone])


def _check(total: int, squares: int, group: Group, log: Sequence[str]) -> None:
    if total * total != squares * group.size:
        began, last = ", ".join(log[:1]), ", ".join(log[1:][-4:])
        raise GroupError(
            "the ranks are at different steps, have not started the same collectives, or report "
            f"other metrics; rank {group.rank} was at {began or 'none'} and started "
            f"{len(log[1:])}, the last ones: {last or 'none'}. Their results are wrong, and the "
            "step is undone. Remedy: make every rank take the same steps, call the same units in "
            "the same order, return the same metrics, and give a weight on all ranks or on none"
        )


def _of_copies(copy: Copy, found: Mapping[str, float]) -> list[int]:
    """A rank's entries for the comparison of copies; see Note [equal copies]. None where there are
    no copies."""
    if copy.num == 1:
        return []
    digest = zlib.crc32(f"{copy.data}: {_bits(found)}".encode())
    first = copy.number == 0
    return [int(first), int(not first), digest * first, digest * (not first)]


def _check_copies(
    sums: Sequence[float], copy: Copy, found: Mapping[str, float], group: Group
) -> None:
    """Raise, on every rank with the same words, unless the copies are equal. An exchange of JSON
    more where they aren't."""
    if not sums:
        return
    num_first, num_others, first, others = map(int, sums)
    if first * num_others == others * num_first:
        return
    told = group.exchange(json.dumps([copy.data, found]).encode())
    seen: dict[int, tuple[int, dict[str, float]]] = {}
    for rank, (data, theirs) in enumerate(map(json.loads, told)):
        other, expected = seen.setdefault(data, (rank, theirs))
        if _bits(expected) != _bits(theirs):
            name = next(n for n in theirs if _bits({n: expected[n]}) != _bits({n: theirs[n]}))
            raise MismatchError(
                f"ranks {other} and {rank} should have the same data, part {data} of the batch, "
                f"and found another {name}: {expected[name]!r} and {theirs[name]!r} (this is rank "
                f"{group.rank}). Remedy: give each rank part `mesh.data.rank` of the batch, and "
                "let the loss draw its random numbers from the state's seed alone"
            )
    raise AssertionError("the sums differ, and the values don't")


def _bits(found: Mapping[str, float]) -> str:
    return repr([float(x).hex() for x in found.values()])


def agree(group: Group, facts: dict[str, Any]) -> None:
    """Raise `MismatchError` on every rank, naming the first field that differs, unless all ranks
    give equal facts.

    Two small exchanges: digests of 32 bytes, and only when they differ the facts themselves, as
    JSON.
    """
    digests = group.exchange(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest())
    if len(set(digests)) == 1:
        return
    # In order: causes come first
    everyone = [json.loads(data) for data in group.exchange(json.dumps(facts).encode())]
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    field, ours, theirs = first_difference(everyone[0], everyone[other])
    like_other = [rank for rank, facts in enumerate(everyone) if facts == everyone[other]]
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


def first_difference(a: Any, b: Any, field: str = "") -> tuple[str, Any, Any]:
    """The dotted name of the first field in which two pieces of plain data differ, and the two
    values."""
    if isinstance(a, dict) and isinstance(b, dict):
        if len(a) == len(b) == 1 and a.keys() != b.keys():
            return field, a, b  # two things by name, adamw and sgd say, rather than fields of one
        for key in [*a, *(k for k in b if k not in a)]:
            if a.get(key, _Absent) != b.get(key, _Absent):
                return first_difference(
                    a.get(key, _Absent), b.get(key, _Absent), f"{field}.{key}".lstrip(".")
                )
    if isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return first_difference(x, y, f"{field}[{i}]")
        if len(a) != len(b):
            return f"the length of {field}", len(a), len(b)
    return field, a, b


class _Absent:
    """Stands for a field that one side does not have."""


def _short(value: Any) -> str:
    if value is _Absent:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
