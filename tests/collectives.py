"""What every group must do: each collective against an obviously right computation. A check runs on
every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from functorch_zero.groups import Group

MOVED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
ADDED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.complex64,
)
COMPARED = (torch.float32, torch.bfloat16, torch.int64, torch.int16)


def data(rank: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What `rank` brings, on the default device: small whole numbers, so that sums are exact in
    every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + n)
    numbers = torch.randint(-5, 6, (n,), generator=generator, device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def same(actual: Tensor, expected: Tensor) -> None:
    """Exactly equal, NaN to NaN too. (assert_close takes seconds to import, in each new
    process.)"""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    both_nan = (actual != actual) & (expected != expected)
    assert ((actual == expected) | both_nan).all(), f"{actual} is not {expected}"


def all_gather(group: Group) -> None:
    for k in (0, 1, 7, 1000):
        for dtype in MOVED:
            out = torch.zeros(group.size * k, dtype=dtype)
            group.all_gather(out, data(group.rank, k, dtype)).wait()
            same(out, torch.cat([data(r, k, dtype) for r in range(group.size)]))


def all_gather_in_place(group: Group) -> None:
    out = torch.zeros(group.size * 3)
    piece = out[group.rank * 3 : group.rank * 3 + 3]
    piece.copy_(data(group.rank, 3))
    group.all_gather(out, piece).wait()
    same(out, torch.cat([data(r, 3, torch.float32) for r in range(group.size)]))


def reduce_scatter(group: Group) -> None:
    for k in (0, 1, 7, 1000):
        for dtype in ADDED:
            out = torch.zeros(k, dtype=dtype)
            group.reduce_scatter(out, data(group.rank, group.size * k, dtype)).wait()
            total = sum(data(r, group.size * k, dtype) for r in range(group.size))
            same(out, total[group.rank * k : (group.rank + 1) * k])


def all_reduce(group: Group) -> None:
    for n in (0, 1, 7, 50_000):  # the last is past ProcessGroup's limit for gathering
        for dtype in ADDED:
            tensor = data(group.rank, n, dtype)
            group.all_reduce(tensor).wait()
            same(tensor, sum(data(r, n, dtype) for r in range(group.size)))
        for dtype in COMPARED:
            tensor = data(group.rank, n, dtype)
            group.all_reduce(tensor, "max").wait()
            same(tensor, torch.stack([data(r, n, dtype) for r in range(group.size)]).amax(0))


def all_reduce_keeps_nan(group: Group) -> None:
    for n in (10, 50_000):
        tensor = torch.full((n,), -float("inf"))
        tensor[group.rank] = float("nan")
        tensor[group.size] = -float(group.rank)
        for op in ("sum", "max"):
            reduced = tensor.clone()
            group.all_reduce(reduced, op).wait()
            assert reduced[: group.size].isnan().all()
            same(reduced[group.size + 1 :], tensor[group.size + 1 :])
        assert reduced[group.size] == 0


def all_reduce_agrees_bitwise(group: Group) -> None:
    for n in (100, 50_000):
        generator = torch.Generator().manual_seed(group.rank)
        digits, exponents = torch.randn(2, n, generator=generator, device="cpu")
        tensor = (digits * 10**exponents).to(torch.get_default_device())
        group.all_reduce(tensor).wait()
        assert len(set(group.exchange(bytes(tensor.view(torch.uint8).tolist())))) == 1


def all_to_all(group: Group) -> None:
    def count(sender: int, receiver: int) -> int:
        return (sender * 3 + receiver * 5) % 4  # uneven, some zero

    ranks = range(group.size)
    in_sizes = [count(group.rank, r) for r in ranks]
    out_sizes = [count(r, group.rank) for r in ranks]
    for dtype in MOVED:
        out = torch.zeros(sum(out_sizes), dtype=dtype)
        group.all_to_all(out, out_sizes, data(group.rank, sum(in_sizes), dtype), in_sizes).wait()
        sent = [
            torch.split(
                data(s, sum(count(s, r) for r in ranks), dtype), [count(s, r) for r in ranks]
            )
            for s in ranks
        ]
        same(out, torch.cat([sent[s][group.rank] for s in ranks]))


def all_to_all_of_nothing(group: Group) -> None:
    nothing, zeros = torch.empty(0), [0] * group.size
    group.all_to_all(nothing, zeros, nothing, zeros).wait()
    only_first = [group.size] + [0] * (group.size - 1)  # all send to rank 0 alone
    out = torch.zeros(group.size**2 if group.rank == 0 else 0)
    sizes = [group.size if group.rank == 0 else 0] * group.size
    group.all_to_all(out, sizes, torch.full((group.size,), float(group.rank)), only_first).wait()
    same(out, torch.arange(group.size).repeat_interleave(group.size).float()[: len(out)])


def broadcast(group: Group) -> None:
    for source in range(group.size):
        for dtype in MOVED:
            tensor = data(group.rank, 5, dtype)
            group.broadcast(tensor, source).wait()
            same(tensor, data(source, 5, dtype))


def exchange(group: Group) -> None:
    def payload(rank: int) -> bytes:
        return bytes(range(rank * 50))

    assert group.exchange(payload(group.rank)) == [payload(r) for r in range(group.size)]
    assert group.exchange(b"") == [b""] * group.size


def barrier(group: Group) -> None:
    for _ in range(3):
        group.barrier()


def several_at_once(group: Group) -> None:
    """Started in one order, waited for in another, one of them twice and one never."""
    gathered, reduced, dropped = (
        torch.zeros(2 * group.size),
        torch.zeros(2),
        torch.zeros(2 * group.size),
    )
    first = group.all_gather(gathered, data(group.rank, 2, torch.float32))
    group.all_gather(dropped, data(group.rank, 2, torch.float32))
    second = group.reduce_scatter(reduced, torch.ones(2 * group.size))
    third = group.all_reduce(tensor := torch.ones(3))
    third.wait()
    second.wait()
    first.wait()
    second.wait()
    same(gathered, torch.cat([data(r, 2, torch.float32) for r in range(group.size)]))
    same(reduced, torch.full((2,), float(group.size)))
    same(tensor, torch.full((3,), float(group.size)))


def tensors_that_require_grad(group: Group) -> None:
    piece = torch.ones(2, requires_grad=True)
    out = torch.zeros(2 * group.size)
    group.all_gather(out, piece).wait()
    assert not out.requires_grad
    whole, part = torch.ones(2 * group.size, requires_grad=True) * 2, torch.zeros(2)
    group.reduce_scatter(part, whole).wait()
    assert not part.requires_grad
    same(part, torch.full((2,), 2.0 * group.size))


def bad_arguments(group: Group) -> None:
    """Each is refused here, before anything is sent, so the group goes on working."""
    n = group.size
    bad: list[Callable[[], object]] = [
        lambda: group.all_gather(torch.zeros(2 * n + 1), torch.zeros(2)),
        lambda: group.all_gather(torch.zeros(2 * n), torch.zeros(2, dtype=torch.float64)),
        lambda: group.all_gather(torch.zeros(n, 2), torch.zeros(2)),
        lambda: group.reduce_scatter(torch.zeros(2), torch.zeros(4 * n)[::2]),
        lambda: group.reduce_scatter(torch.zeros(2), torch.zeros(2 * n + 1)),
        lambda: group.all_reduce(torch.tensor(1.0)),
        lambda: group.all_reduce(torch.ones(2, dtype=torch.complex64).conj()),
        lambda: group.all_reduce(torch.ones(2), "mean"),
        lambda: group.all_to_all(torch.zeros(n), [1] * n, torch.zeros(n), [1] * (n + 1)),
        lambda: group.all_to_all(torch.zeros(n), [1] * n, torch.zeros(n + 1), [1] * n),
        lambda: group.broadcast(torch.zeros(1), n),
    ]
    for call in bad:
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"not refused: bad argument number {bad.index(call)}")
    try:
        group.all_reduce(torch.ones(1, dtype=torch.bool))
    except TypeError:
        group.barrier()
        return
    raise AssertionError("not refused: a sum of bool")


CHECKS = [
    all_gather,
    all_gather_in_place,
    reduce_scatter,
    all_reduce,
    all_reduce_keeps_nan,
    all_reduce_agrees_bitwise,
    all_to_all,
    all_to_all_of_nothing,
    broadcast,
    exchange,
    barrier,
    several_at_once,
    tensors_that_require_grad,
    bad_arguments,
]


def check_all(group: Group) -> list[str]:
    """Run every check; the names of those that ran."""
    for check in CHECKS:
        check(group)
    return [check.__name__ for check in CHECKS]
