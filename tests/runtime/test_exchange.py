"""Exchanges that a loss starts, and those that they owe in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError, StructureError
from functorch_zero.groups import counted, labelled, run_ranks
from functorch_zero.runtime.unit import Pass
from tests.compare import assert_equal_updates, assert_same_on_all_ranks, train, train_sharded
from tests.modules import Net, seeded, towers
from tests.tiers import crossed, tiers

D = torch.float64
LEVELS: dict[str, Any] = {
    "0": 0,
    "1": 1,
    "2": 2,
    "3": 3,
    "mixed": {"": 3, "a": 1, "b": 0},
}


def two_towers() -> Net:
    """Two towers, each a unit, and a leaf beside them."""
    a, b = towers(4)
    scale = nn.Parameter(torch.tensor(1.5))
    return Net(lambda net, x, y: (net.a(x), net.b(y), net.scale), a=a, b=b, scale=scale)


class Sum:
    """The sum over ranks, and in backward that of its gradients."""

    def __init__(self, group: Any, x: Tensor):
        self._group, self.word = labelled(group, "loss/sum"), f"a sum, of {tuple(x.shape)}"

    def there(self, x: Tensor) -> Tensor:
        flat = x.clone().view(-1)
        self._group.all_reduce(flat).wait()
        return flat.view(x.shape)

    def back(self, grad: Tensor) -> Tensor:
        return self.there(grad)


class Summing:
    """The sum over ranks inside of a loss that has these params; in one process, the identity."""

    def __init__(self, group: Any, params: Any):
        self._group, self._around = group, pass_of(params)
        self.rank = None if self._around is None else group.rank

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._around is None else self._around.exchange(Sum(self._group, x), x)


def pass_of(params: Any) -> Pass | None:
    """The pass that a loss with these params is in; None in one process."""
    entrance = getattr(optree.tree_leaves(params)[0], "entrance", None)
    return None if entrance is None else entrance.around


Loss = Callable[[Any, Any, Any, Any, Summing], Any]


def step_of(loss: Loss, group: Any, remat: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """(the step, params, buffers) of a loss `(apply, params, buffers, batch, sum over ranks)`."""
    model = seeded(lambda: two_towers().to(D))
    apply, params, buffers = fz.functionalize(model, units=["a", "b"], remat=remat)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        return loss(apply, params, buffers, batch, Summing(group, params))

    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1))
    return fz.train_step(loss_fn, optimizer, **options), params, buffers


def batches(num: int = 2, rows: int = 8) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        make = lambda: {"x": torch.randn(rows, 6, dtype=D), "y": torch.randn(rows, 5, dtype=D)}
        return [make() for _ in range(num)]


def check(loss: Loss, level: Any, sizes: list[int], **options: Any) -> None:
    """Sharded = one process."""
    remat = options.pop("remat", False)
    given = batches(rows=sum(sizes))
    expected = train(*step_of(loss, None, remat), given)
    got = run_ranks(
        lambda group: train_sharded(
            group, *step_of(loss, group, remat), given, sizes, level=level, **options
        ),
        len(sizes),
    )
    assert_same_on_all_ranks(got)
    assert_equal_updates(expected, got[0])


def whole(apply: Any, params: Any, buffers: Any, batch: Any, summed: Summing) -> Tensor:
    """Each rank has the loss of the whole batch, through one sum after the other."""
    (x, y, scale), _ = apply(params, buffers, batch["x"], batch["y"])
    total = summed((x.T @ y) * scale)  # (4, 4)
    return summed(((x @ total) ** 2).sum()) / 100 + total.sum()


def own(apply: Any, params: Any, buffers: Any, batch: Any, summed: Summing) -> Any:
    """Each rank has the loss of its own rows, by what all rows are."""
    (x, y, scale), _ = apply(params, buffers, batch["x"], batch["y"])
    center = summed(x.square().sum(0)) / 8
    return ((x - center) * (y + scale)).square().mean(), fz.Aux(weight=len(x))


def apart(apply: Any, params: Any, buffers: Any, batch: Any, summed: Summing) -> Tensor:
    """Losses that differ by rank in what they use: on ranks, rank 1 has the second part alone."""
    (x, y, scale), _ = apply(params, buffers, batch["x"], batch["y"])
    first, second = summed((x**2).sum(0)), summed((y**3).sum(0))
    rank = summed.rank
    if rank is None:
        return (first.square().sum() + second.square().sum()) * scale
    return 2 * (second if rank else first).square().sum() * scale


def in_checkpoint(apply: Any, params: Any, buffers: Any, batch: Any, summed: Summing) -> Tensor:
    """Exchanges in a checkpoint's region; rank 1 of the ranks makes no use of the first one's."""

    def region(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            center = summed(y.detach().sum(0))
        first = summed(x.sin().square().sum(0)).tanh_()
        return first, summed((y.cos() * scale - center).tanh().sum(0)).sin()

    towers, _ = apply(params, buffers, batch["x"], batch["y"])
    first, second = checkpoint(region, *towers, use_reentrant=False)
    if summed.rank is None:
        return first.square().sum() + second.square().sum()
    return 2 * (second if summed.rank else first).square().sum()


LOSSES: dict[str, Loss] = {
    "whole": whole, "own": own, "apart": apart, "in a checkpoint": in_checkpoint,
}  # fmt: skip
SIZES = ([4, 4], [3, 3, 2], [8, 0])


@pytest.mark.filterwarnings("ignore::functorch_zero.errors.UnequalBatchesWarning")
@pytest.mark.parametrize(
    ("level", "loss", "sizes", "remat"),
    crossed(LEVELS, ["whole", "own"], SIZES, (False, True), n=10),
)
def test_losses_that_exchange(level: str, loss: str, sizes: list[int], remat: bool) -> None:
    check(LOSSES[loss], LEVELS[level], sizes, remat=remat)


@pytest.mark.parametrize(
    ("loss", "level"), crossed(["apart", "in a checkpoint"], [*LEVELS], quick=1)
)
def test_a_rank_whose_loss_makes_no_use_of_what_it_got(level: str, loss: str) -> None:
    """Others have gradients for it all the same, and wait for its zeros."""
    check(LOSSES[loss], LEVELS[level], [4, 4])


def test_a_region_that_runs_again_starts_no_collective() -> None:
    def run(group: Any) -> int:
        of_sums = counted(group)
        step, params, buffers = step_of(in_checkpoint, of_sums)
        sharded = fz.shard(step, level=0, group=group)
        part = {name: x[:4] for name, x in batches(1)[0].items()}
        sharded(sharded.init(params, buffers), part)
        return of_sums.num_calls()

    # Three in forward, of which two have gradients
    assert run_ranks(run, 2) == [5, 5]


@pytest.mark.parametrize("level", tiers([3], [0]))
def test_the_seed_carries_weights_in_the_losss_dtype(level: int) -> None:
    """A float32 loss of float64 leaves: a factor of packed gradients would be the receiver's."""

    def in_float32(*given: Any) -> Any:
        return whole(*given).float(), fz.Aux(weight=len(given[3]["x"]))

    check(in_float32, level, [6, 2])


def test_a_weight_that_the_losss_dtype_rounds_is_refused() -> None:
    def in_bfloat16(*given: Any) -> Any:
        return whole(*given).bfloat16(), fz.Aux(weight=1001.0)

    with pytest.raises(StructureError, match=r"would round.*bfloat16.*loss\.float\(\)"):
        check(in_bfloat16, 0, [4, 4])


# Refused


def inner_gradient(apply: Any, params: Any, buffers: Any, batch: Any, summed: Summing) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (z, y, scale), _ = apply(params, buffers, x, batch["y"])
    (slope,) = torch.autograd.grad(summed(z.sum(0)).square().sum(), x, create_graph=True)
    return slope.square().sum() + (y * scale).sum()


def by_torch_func(apply: Any, params: Any, buffers: Any, batch: Any, summed: Summing) -> Tensor:
    (z, y, scale), _ = apply(params, buffers, batch["x"], batch["y"])
    slope = torch.func.grad(lambda t: summed((z * t).sum(0)).square().sum())(scale)
    return slope + y.sum()


def checkpoints_in_each_other(
    apply: Any, params: Any, buffers: Any, batch: Any, summed: Summing
) -> Tensor:
    (x, y, scale), _ = apply(params, buffers, batch["x"], batch["y"])

    def inner(x: Tensor) -> Tensor:
        return summed(x.sin().sum(0)).sin()

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=False).sin()

    return checkpoint(outer, x, use_reentrant=False).sum() * scale + y.sum()


REFUSED: dict[str, tuple[Loss, str]] = {
    "an inner gradient": (inner_gradient, "inside of a loss, through rows of other ranks"),
    "torch.func": (by_torch_func, "inside of a transform of torch.func"),
    "checkpoints in each other": (checkpoints_in_each_other, "ran again in backward"),
}


@pytest.mark.parametrize(("what", "level"), crossed(REFUSED, (0, 3), n=4))
def test_refused_on_all_ranks(what: str, level: int) -> None:
    loss, words = REFUSED[what]

    def run(group: Any) -> str:
        step, params, buffers = step_of(loss, group)
        sharded = fz.shard(step, level=level, group=group)
        part = {k: x[:4] for k, x in batches(1)[0].items()}
        with pytest.raises((StructureError, GroupError)) as caught:
            sharded(sharded.init(params, buffers), part)
        return str(caught.value)

    texts = run_ranks(run, 2)
    assert any(words in text and "Remedy" in text for text in texts), texts
    # In one process the loss is a loss like any other
    train(*step_of(loss, None), batches(1))


# Ranks that differ


@pytest.mark.parametrize(("level", "at"), crossed(LEVELS, (0, 2), n=4))
def test_a_rank_that_leaves_an_exchange_out(level: str, at: int) -> None:
    """An error on all ranks; and all go on once the rank does as the others do."""

    def run(group: Any) -> tuple[str, float]:
        num_calls = 0

        def loss(*given: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            *others, summed = given
            leaves_out = group.rank == 1 and num_calls == at + 1
            return own(*others, (lambda x: x) if leaves_out else summed)

        step, params, buffers = step_of(loss, group)
        sharded = fz.shard(step, level=LEVELS[level], group=group)
        part = {name: x[:4] for name, x in batches(1)[0].items()}
        state = sharded.init(params, buffers)
        for _ in range(at):
            state, _ = sharded(state, part)
        with pytest.raises(GroupError) as caught:
            sharded(state, part)
        state, metrics = sharded(state, part)
        return str(caught.value), float(metrics["loss"])

    found = run_ranks(run, 2)
    assert any("a sum" in text for text, _ in found), found
    assert len({number for _, number in found}) == 1


def test_a_rank_whose_part_requires_no_grad() -> None:
    """Backward's collectives would differ."""

    def run(group: Any) -> str:
        def loss(*given: Any) -> Any:
            (x, y, scale), _ = given[0](*given[1:3], given[3]["x"], given[3]["y"])
            return given[4]((x.detach() if group.rank else x).sum()).sin() + (y * scale).sum()

        step, params, buffers = step_of(loss, group)
        sharded = fz.shard(step, level=3, group=group)
        part = {name: x[:4] for name, x in batches(1)[0].items()}
        with pytest.raises(GroupError) as caught:
            sharded(sharded.init(params, buffers), part)
        return str(caught.value)

    assert all("with gradients; rank 1: " in text for text in run_ranks(run, 2))


def test_losses_without_an_exchange_compare_nothing_at_level_0() -> None:
    def run(group: Any) -> int:
        group = counted(group)
        step, params, buffers = step_of(lambda *given: own(*given[:4], lambda x: x), group)
        sharded = fz.shard(step, level=0, group=group)
        state, part = sharded.init(params, buffers), {k: x[:4] for k, x in batches(1)[0].items()}
        group.reset()
        sharded(state, part)
        return group.num_calls("exchange")

    assert run_ranks(run, 2) == [0, 0]
