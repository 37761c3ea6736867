"""Losses over the whole batch: on ranks what they are in one process."""

from __future__ import annotations

import copy
import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import batch as whole
from functorch_zero import optim
from functorch_zero.errors import GroupError, StructureError
from functorch_zero.groups import HybridGroup, counted, launch, run_ranks
from functorch_zero.runtime import same_uses
from tests.compare import (
    REORDERED,
    assert_equal_updates,
    assert_same_on_all_ranks,
    train,
    train_sharded,
)
from tests.models import split
from tests.modules import Net, seeded, towers
from tests.tiers import crossed, thinned, tiers

D = torch.float64
Batch = dict[str, Tensor]
Results = Any  # a loss, or a loss and an Aux


def two_towers() -> Net:
    """Two encoders of one thing, each a unit, and a temperature beside them."""
    # A bias before losses that normalise has a gradient of nothing but rounding
    a, b = towers(8, bias=False)
    scale = nn.Parameter(torch.tensor(1.0))
    return Net(lambda net, x, y: (net.a(x), net.b(y)), a=a, b=b, scale=scale)


def clip(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    """Radford et al. (2021). Each rank has the loss of the whole batch."""
    x, y = whole.all_rows(F.normalize(x, dim=1)), whole.all_rows(F.normalize(y, dim=1))
    logits, labels = scale.exp() * x @ y.T, torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def clip_of_own_rows(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    """The same loss: each rank has that of its own rows against all."""
    x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    all_x, all_y = whole.all_rows(x), whole.all_rows(y)
    labels = torch.arange(len(all_x))[whole.own_rows(x)]
    one = F.cross_entropy(scale.exp() * x @ all_y.T, labels)
    other = F.cross_entropy(scale.exp() * y @ all_x.T, labels)
    return (one + other) / 2, fz.Aux(weight=len(x))


def simclr(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    """Chen et al. (2020): of 2 n views each is to find its other."""
    z = whole.all_rows(F.normalize(torch.stack([x, y], 1), dim=2))  # (n, 2, d)
    flat = z.transpose(0, 1).reshape(-1, z.shape[2])
    itself = torch.eye(len(flat), dtype=torch.bool)
    logits = (scale.exp() * flat @ flat.T).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(flat)).roll(len(z)))


def barlow_twins(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    """Zbontar et al. (2021): the correlation of features is to be the identity."""

    def normed(z: Tensor) -> Tensor:
        center = z - whole.mean(z)
        return center / (whole.mean(center.square()) + 1e-6).sqrt()

    correlation = whole.mean(normed(x)[:, :, None] * normed(y)[:, None, :])
    off = (correlation - torch.eye(x.shape[1])).square()
    return (off.diagonal().sum() + 0.01 * off.sum()) * scale.exp()


def vicreg(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    """Bardes et al. (2022): invariance, variance, covariance."""
    total = whole.mean((x - y).square()).mean() * scale.exp()
    for z in map(whole.all_rows, (x, y)):
        center = z - z.mean(0)
        covariance = center.T @ center / (len(z) - 1)
        deviation = (covariance.diagonal() + 1e-4).sqrt()
        total = total + F.relu(2 - deviation).mean()
        total = total + covariance.fill_diagonal_(0).square().sum() / z.shape[1]
    return total


def dino(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    """Caron et al. (2021): the teacher's outputs are centred by their mean over all rows."""
    with torch.no_grad():
        center = whole.mean(y)
        target = ((y - center) / 0.2).softmax(1)
    # The teacher is trained too, so that each leaf has a gradient
    crossing = -(target * (scale.exp() * x).log_softmax(1)).sum(1)
    return whole.mean(crossing) + whole.mean(y.square()).sum()


def balance(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    """Fedus et al. (2021): experts are to have equal shares of all tokens."""
    chances = (4 * x).softmax(1)
    share = whole.mean(F.one_hot(chances.argmax(1), x.shape[1]).to(x.dtype))
    num = whole.sum(torch.tensor(len(x)))
    used = whole.sum(y.square().sum(0)) / num
    return 8 * (share * whole.mean(chances)).sum() * scale.exp() + used.mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Results]] = {
    "clip": clip,
    "clip of own rows": clip_of_own_rows,
    "simclr": simclr,
    "barlow twins": barlow_twins,
    "vicreg": vicreg,
    "dino": dino,
    "balance": balance,
}
LEVELS: dict[str, Any] = {"0": 0, "1": 1, "2": 2, "3": 3, "mixed": {"": 3, "a": 1, "b": 0}}
# The ranks' numbers of rows, and options of `given`
WAYS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "two ranks": ([4, 4], {}),
    "uneven, remat": ([3, 3, 2], {"remat": True}),
    "an empty part, in chunks": ([8, 0], {"chunks": 3}),
    "one rank": ([8], {}),
    "five ranks, remat": ([2, 0, 1, 3, 2], {"remat": True}),
    "a loss in float32": ([6, 2], {"float32": True}),
}
STEP = optim.chain(optim.clip_by_global_norm(0.1), optim.adam(1e-2))


def loss_of(
    apply: Any, of_rows: Any, chunks: int = 0, float32: bool = False
) -> Callable[[Any, Any, Batch], Results]:
    """A step's loss of two towers' outputs."""

    def loss(params: Any, buffers: Any, batch: Batch) -> Results:
        def encode(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return apply(params, buffers, x, y)[0]

        encoded = whole.in_chunks(encode, chunks) if chunks else encode
        result = of_rows(*encoded(batch["x"], batch["y"]), fz.unshard(params)["scale"])
        if not float32:
            return result
        loss, *aux = result if isinstance(result, tuple) else (result,)
        return (loss.float(), *aux) if aux else loss.float()

    return loss


def given(
    of_rows: Any, *, remat: bool = False, accumulate: int = 1, optimizer: Any = STEP, **options: Any
) -> tuple[Any, Any, Any]:
    """(the step, params, buffers) of a loss of the towers' outputs."""
    model = seeded(lambda: two_towers().to(D))
    apply, params, buffers = fz.functionalize(model, units=["a", "b"], remat=remat)
    loss = loss_of(apply, of_rows, **options)
    return fz.train_step(loss, optimizer, accumulate=accumulate), params, buffers


def batches(num: int = 2, rows: int = 8) -> list[Batch]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        make = lambda: {
            "x": torch.randn(rows, 6, dtype=D),
            "y": torch.randn(rows, 5, dtype=D),
        }
        return [make() for _ in range(num)]


def check(make: Callable[[], Any], sizes: list[int], mesh: int = 0, **options: Any) -> None:
    """Sharded = one process on the whole batch."""
    data = batches(rows=sum(sizes))
    expected = train(*make(), data)

    def run(group: Any) -> Any:
        group = HybridGroup(group, shard_size=mesh) if mesh else group
        return train_sharded(group, *make(), data, sizes, **options)

    got = run_ranks(run, len(sizes))
    assert_same_on_all_ranks(got)
    is_wide = expected.metrics[0]["loss"].dtype == torch.float64
    # Of all leaves, in float64; a loss in float32 is a mean of the ranks' rounded ones
    assert_equal_updates(
        expected,
        got[0],
        tolerance=lambda path: REORDERED if is_wide or path != "loss" else 1e-6,
    )


@pytest.mark.parametrize(("loss", "level", "way"), crossed(LOSSES, LEVELS, WAYS, n=20))
def test_losses_over_the_whole_batch(loss: str, level: str, way: str) -> None:
    sizes, options = WAYS[way]
    check(lambda: given(LOSSES[loss], **options), sizes, level=LEVELS[level])


def test_a_rank_without_rows_that_receives_a_nan() -> None:
    """Its loss is NaN by the others' rows, and not as a mean of nothing: all skip the step."""
    made, params, buffers = given(clip)
    step, data = fz.train_step(made.loss_fn, STEP, nonfinite="skip"), batches(3)
    data[1]["x"][0, 0] = torch.nan

    def skipped(step: Any, own: Callable[[Batch], Batch]) -> list[float]:
        state, found = step.init(params, buffers), []
        for batch in data:
            state, metrics = step(state, own(batch))
            found.append(float(metrics["skipped"]))
        return found

    def run(group: Any) -> list[float]:
        sharded = fz.shard(step, level=3, group=group)
        return skipped(sharded, lambda batch: split(batch, [8, 0])[group.rank])

    expected = skipped(step, lambda batch: batch)
    assert expected == [0, 1, 1]
    assert run_ranks(run, 2) == [expected] * 2


@pytest.mark.parametrize("options", thinned([{"remat": True}, {"chunks": 3}]), ids=str)
def test_a_rank_without_rows_whose_loss_weighs_nothing(options: dict[str, Any]) -> None:
    """Its loss is left out, and its backward goes the others' way all the same."""
    check(lambda: given(clip_of_own_rows, **options), [8, 0], level=3)


@pytest.mark.parametrize(("loss", "level"), crossed(["clip", "balance"], (0, 2, 3), n=3))
def test_on_a_mesh(loss: str, level: int) -> None:
    check(lambda: given(LOSSES[loss]), [3, 3, 1, 1], mesh=2, level=level)


def test_over_replicas_of_the_same_data() -> None:
    """The batch is whole along the axis on which data differ."""
    (data,) = batches(1)

    def run(group: Any) -> Any:
        group = HybridGroup(group, shard_size=2, same_data="shard")
        step, params, buffers = given(clip)
        sharded = fz.shard(step, level=3, group=group)
        state, _ = sharded(sharded.init(params, buffers), split(data, [5, 3])[group.rank // 2])
        return sharded.unshard(state).params

    step, params, buffers = given(clip)
    expected = step(step.init(params, buffers), data)[0].params
    for found in run_ranks(run, 4):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-13)


def the_sum_itself(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    return whole.sum((x * y).sum() * scale + x.square().sum())


def written_to(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    rows, total = whole.all_rows(x), whole.sum(y.sum(0))
    rows *= 2
    return (rows @ total.tanh_()).square().mean() * scale


def not_used(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    whole.all_rows(x)
    return whole.mean((x * y).square()).sum() * scale


def complex_rows(x: Tensor, y: Tensor, scale: Tensor) -> Results:
    z = whole.all_rows(torch.complex(x, y))
    return (z * z.conj()).real.square().mean() * scale + whole.mean(z).abs().sum()


EDGES = {"the sum itself": the_sum_itself, "written to": written_to, "not used": not_used,
         "complex": complex_rows}  # fmt: skip


@pytest.mark.parametrize(("loss", "level"), crossed(EDGES, LEVELS, n=5, quick=1))
def test_results_used_in_other_ways(loss: str, level: str) -> None:
    check(lambda: given(EDGES[loss]), [3, 3, 2], level=LEVELS[level])


OPTIONS: dict[str, dict[str, Any]] = {
    "once": {"reduce_gradients": "once"},
    "kept": {"reshard_after_forward": False},
    "over time": {"overlap": "time"},
    "not donated": {"donate": False},
    "over both axes": {"mesh": 2, "state_axes": "both"},
}


@pytest.mark.parametrize(("options", "level"), crossed(OPTIONS, (0, 1, 2, 3), n=5, quick=1))
def test_options_of_shard(options: str, level: int) -> None:
    check(lambda: given(clip, remat=True), [3, 3, 2, 0], level=level, **OPTIONS[options])


# BatchNorm


def normed_net(norm: type[nn.Module] = nn.BatchNorm1d, **options: Any) -> Net:
    """No bias before a BatchNorm: its gradient is nothing but rounding."""
    return Net(
        lambda net, x: net.head(net.b(net.a(x))),
        a=nn.Sequential(nn.Linear(6, 7, bias=False), norm(7, **options), nn.Tanh()),
        b=nn.Sequential(nn.Linear(7, 7, bias=False), norm(7, **options), nn.Tanh()),
        head=nn.Linear(7, 5),
    )


NORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum None": {"momentum": None},
    "not affine": {"affine": False},
    "not tracked": {"track_running_stats": False},
    "torch's SyncBatchNorm": {"norm": nn.SyncBatchNorm},
}


def normed(of_all: bool = True, remat: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    model = seeded(lambda: normed_net(**options).to(D))
    if of_all:
        model = whole.sync_batch_norm(model)
    apply, params, buffers = fz.functionalize(model, units=["a", "b"], remat=remat)

    def loss(params: Any, buffers: Any, batch: Batch) -> Results:
        output, buffers = apply(params, buffers, batch["x"])
        weight = len(output)
        return (output - batch["y"]).square().mean(), fz.Aux(buffers=buffers, weight=weight)

    return fz.train_step(loss, optim.sgd(0.1)), params, buffers


@pytest.mark.parametrize(
    ("norm", "level", "sizes", "remat"),
    crossed(NORMS, LEVELS, ([4, 4], [3, 3, 2], [8, 0]), (False, True), n=12),
)
def test_batch_norm_over_the_whole_batch(
    norm: str, level: str, sizes: list[int], remat: bool
) -> None:
    check(lambda: normed(remat=remat, **NORMS[norm]), sizes, level=LEVELS[level])


def test_batch_norm_of_one_value_per_feature() -> None:
    """Refused as by torch, in one process and on ranks, of which one has the row."""
    (batch,) = batches(1, rows=1)

    def said(group: Any) -> str:
        step, params, buffers = normed()
        if group is not None:
            step = fz.shard(step, level=0, group=group)
            own = {name: x.split([1, 0])[group.rank] for name, x in batch.items()}
        with pytest.raises((ValueError, GroupError)) as raised:
            step(step.init(params, buffers), batch if group is None else own)
        return str(raised.value)

    assert "more than 1 value per channel" in said(None)
    for words in run_ranks(said, 2):
        assert "at least two values per feature of the whole batch, got 1" in words


@pytest.mark.parametrize("norm", [name for name in NORMS if "torch" not in name])
def test_in_one_process_they_are_torchs(norm: str) -> None:
    data = batches()
    ours, theirs = (train(*normed(of_all, **NORMS[norm]), data) for of_all in (True, False))
    for a, b in zip(ours.states, theirs.states, strict=True):
        assert all(torch.equal(x, b.params[name]) for name, x in a.params.items())
        assert all(torch.equal(x, b.buffers[name]) for name, x in a.buffers.items())
    images = whole.sync_batch_norm(nn.Sequential(nn.BatchNorm2d(3))).eval()
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(images(x), copy.deepcopy(images)(x))


# Chunks


def test_chunks_draw_their_random_numbers_again() -> None:
    """Dropout in one process: the masks of forward, once more in backward."""
    x = torch.randn(6, 3, dtype=D, requires_grad=True)
    kept: list[Tensor] = []

    def drop(x: Tensor) -> Tensor:
        dropped = F.dropout(x.sin(), 0.5)
        kept.append(dropped.detach() != 0)
        return dropped.square()

    whole.in_chunks(drop, 3)(x).sum().backward()
    masks = torch.cat(kept[:3])
    again = torch.cat(kept[:2:-1])  # backward begins with the last chunk
    assert x.grad is not None and torch.equal(masks, again)
    torch.testing.assert_close(x.grad, masks * (4 * 2 * x.sin() * x.cos()).detach())


def test_chunks_take_and_give_trees() -> None:
    def pair(batch: Batch, y: Tensor) -> dict[str, Tensor]:
        return {"sum": batch["x"] + y, "rows": torch.full((len(y),), len(y))}

    found = whole.in_chunks(pair, 2)({"x": torch.arange(5)}, torch.arange(5))
    assert found["sum"].tolist() == [0, 2, 4, 6, 8] and found["rows"].tolist() == [3, 3, 3, 2, 2]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        whole.in_chunks(pair, 0)
    with pytest.raises(StructureError, match="in_chunks was given no rows"):
        whole.in_chunks(lambda x: x.sum(), 2)(torch.ones(4))


# The proof, evaluations, programs


@pytest.mark.thorough
@pytest.mark.parametrize("levels", [(0, 3), (1, 2)])
def test_the_proof_without_per_rank(levels: tuple[int, ...]) -> None:
    step, params, buffers = given(clip)
    fz.testing.assert_sharded_equals_unsharded(
        step, params, buffers, batches(rows=6), levels=levels, ranks=(1, 2, 3)
    )


@pytest.mark.parametrize("level", tiers([0], [1, 2, 3]))
def test_the_proof_with_parts_that_differ(level: int) -> None:
    """Five rows of three ranks. A weight of 1: each rank has the whole batch's loss."""
    step, params, buffers = given(lambda *rows: (vicreg(*rows), fz.Aux(weight=1.0)))
    fz.testing.assert_sharded_equals_unsharded(
        step, params, buffers, batches(rows=5), levels=(level,), ranks=(3,)
    )


def test_the_proof_sees_a_loss_of_a_ranks_own_rows() -> None:
    own_rows = lambda x, y, scale: F.cross_entropy(scale * x @ y.T, torch.arange(len(x)))
    step, params, buffers = given(own_rows)
    with pytest.raises(AssertionError):
        fz.testing.assert_sharded_equals_unsharded(
            step, params, buffers, batches(), levels=(0,), ranks=(2,)
        )


@pytest.mark.parametrize("level", [0, 3])
def test_evaluations(level: int) -> None:
    (data,) = batches(1)
    step, params, buffers = given(clip)
    apply, _, _ = seeded(lambda: fz.functionalize(two_towers().to(D), units=["a", "b"]))
    loss = loss_of(apply, clip)
    evaluation = fz.eval_step(lambda *args: {"loss": loss(*args)})

    def run(group: Any) -> tuple[float, list[str]]:
        state = fz.shard(step, level=level, group=group).init(params, buffers)
        sharded = fz.shard(evaluation, level=level, group=group)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            metrics = sharded(state, split(data, [3, 3, 2])[group.rank])
        return float(metrics["loss"]), [str(w.message) for w in seen]

    expected = float(evaluation(step.init(params, buffers), data)["loss"])
    assert run_ranks(run, 3) == [(pytest.approx(expected, rel=1e-12), [])] * 3


def test_outside_of_a_programs_losses() -> None:
    """In the program's own code no rows of other ranks can be asked for."""
    (data,) = batches(1)
    apply, params, _ = seeded(lambda: fz.functionalize(two_towers().to(D), units=["a", "b"]))
    loss = loss_of(apply, clip)

    def program(params: Any, batch: Batch) -> Any:
        whole.all_rows(batch["x"])
        value, grads = fz.value_and_grad(lambda p, batch: loss(p, {}, batch))(params, batch=batch)
        return fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads)), {"loss": value}

    step = fz.program_step(program, init=lambda params: params)
    step(step.init(params), data)  # the identity in one process

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group)
        with pytest.raises(StructureError, match="outside of a loss"):
            sharded(sharded.init(params), split(data, [5, 3])[group.rank])

    run_ranks(run, 2)


# Traffic


@pytest.mark.parametrize("level", tiers([3], [0]))
def test_rows_travel_once_each_way(level: int) -> None:
    """4 rows of 8 float64 of each of two towers; nothing else in the loss but whole units."""
    num_bytes = 2 * 4 * 8 * 8

    def run(group: Any) -> list[tuple[int, float]]:
        found = []
        for of_rows in (clip, lambda x, y, scale: (x * y).sum() * scale):
            recorded = counted(group)
            step, params, buffers = given(of_rows)
            sharded = fz.shard(step, level=level, group=recorded)
            state, part = sharded.init(params, buffers), split(batches(1)[0], [4, 4])[group.rank]
            for _ in range(10):
                state, _ = sharded(state, part)
            recorded.reset()
            sharded(state, part)
            sent = [recorded.sent_bytes(kind) for kind in ("all_gather", "reduce_scatter")]
            found.append((recorded.num_calls("exchange"), *sent))
        (exchanges, gathered, reduced), (without, *others) = found
        return [exchanges - without, gathered - others[0], reduced - others[1]]

    # And one exchange of the hosts, once ranks rely on the uses of earlier passes
    assert run_ranks(run, 2) == [[1, num_bytes, num_bytes]] * 2


# Refused, or an error


def failing(
    make: Callable[[Any], Any], level: Any = 0, ranks: int = 2, kind: Any = Exception
) -> list[str]:
    """The errors of all ranks' first step, with the step that `make` gives each."""

    def run(group: Any) -> str:
        step, params, buffers = make(group)
        sharded = fz.shard(step, level=level, group=group)
        part = split(batches(1, 4 * ranks)[0], [4] * ranks)[group.rank]
        with pytest.raises(kind) as caught:
            sharded(sharded.init(params, buffers), part)
        return str(caught.value)

    return run_ranks(run, ranks)


def weighing_nothing(group: Any) -> Any:
    def loss(*rows: Tensor) -> Results:
        return clip(*rows), fz.Aux(weight=1.0 - group.rank)

    return given(loss)


def in_a_thread(group: Any) -> Any:
    def loss(*rows: Tensor) -> Results:
        errors: list[Exception] = []

        def run() -> None:
            try:
                clip(*rows)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        raise errors[0]

    return given(loss)


def in_a_chunk(group: Any) -> Any:
    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Results:
        return whole.in_chunks(whole.all_rows, 2)(x).sum() * scale

    return given(loss)


def in_a_penalty(group: Any) -> Any:
    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Results:
        (slope,) = torch.autograd.grad(clip(x, y, scale), x, create_graph=True)
        return slope.square().sum()

    return given(loss)


def under_vmap(group: Any) -> Any:
    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Results:
        return torch.func.vmap(whole.all_rows, in_dims=1)(x).sum() * scale + y.sum()

    return given(loss)


REFUSED: dict[str, tuple[Any, str]] = {
    "weight 0 after giving rows": (weighing_nothing, "gave rows to the other ranks"),
    "micro-batches": (lambda group: given(clip, accumulate=2), r"fz\.batch\.in_chunks"),
    "a thread of the loss": (in_a_thread, "outside of a loss"),
    "a chunk": (in_a_chunk, "in a chunk of"),
    "a gradient penalty": (in_a_penalty, "through rows of other ranks"),
    "vmap": (under_vmap, "inside of a transform of torch.func"),
    "a number": (lambda group: given(lambda x, y, s: whole.all_rows(s)), "was given no rows"),
}


@pytest.mark.parametrize(("what", "level"), crossed(REFUSED, (0, 3), n=3))
def test_refused(what: str, level: int) -> None:
    make, words = REFUSED[what]
    texts = failing(make, level, kind=(StructureError, GroupError))
    assert any(re.search(words, text) and "Remedy" in text for text in texts), texts


def test_fz_hvp_is_refused() -> None:
    apply, params, _ = seeded(lambda: fz.functionalize(two_towers().to(D), units=["a", "b"]))
    loss = loss_of(apply, clip)

    def run(group: Any) -> str:
        tree = fz.shard_tree(params, level=3, group=group)
        own = split(batches(1)[0], [4, 4])[group.rank]
        of_params = lambda params, batch: loss(params, {}, batch)
        with pytest.raises((StructureError, GroupError)) as caught:
            fz.hvp(of_params)(tree, fz.zero_updates(tree), batch=own)
        return str(caught.value)

    assert any("fz.hvp can't go through" in text for text in run_ranks(run, 2))


def test_outside_of_a_loss() -> None:
    """By hand in one process the identity; on ranks never."""
    x = torch.ones(2, 3)
    assert whole.all_rows(x) is x and whole.sum(x) is x and whole.own_rows(x) == slice(0, 2)

    def run(group: Any) -> str:
        with pytest.raises(StructureError) as caught:
            whole.all_rows(x)
        return str(caught.value)

    assert all("outside of a loss" in text for text in run_ranks(run, 2))

    # An unsharded step on a rank is one process's
    def alone(group: Any) -> float:
        step, params, buffers = given(clip, remat=True)
        return float(step(step.init(params, buffers), batches(1)[0])[1]["loss"])

    assert len(set(run_ranks(alone, 2))) == 1


def test_other_rows_on_one_rank() -> None:
    """Rows of another shape, or a call that a rank leaves out: an error on all."""

    def make(group: Any) -> Any:
        def loss(x: Tensor, y: Tensor, scale: Tensor) -> Results:
            return whole.all_rows(x[:, : 8 - group.rank]).square().sum() * scale + y.sum()

        return given(loss)

    for level in (2, 3):
        assert all("fz.batch.all_rows" in text for text in failing(make, level, kind=GroupError))


# Processes


def over_gloo(run: Callable[[Any], Any], ranks: int = 2) -> list[Any]:
    def process() -> Any:
        same_uses.SECONDS = 1.0  # that a question waits, in a process of its own
        return run(fz.ProcessGroup(timeout=40))

    return launch(process, ranks, start_method="fork", timeout=60)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_processes(ranks: int) -> None:
    data, sizes = batches(), [5, 3] if ranks == 2 else [5, 3, 0]
    cases = {
        (0, "clip"): lambda: given(clip),
        (3, "clip, remat"): lambda: given(clip, remat=True),
        (2, "own rows"): lambda: given(clip_of_own_rows, chunks=2),
        (3, "norm"): normed,
    }

    def run(group: Any) -> Any:
        made = {}
        for (level, name), make in cases.items():
            made[level, name] = train_sharded(group, *make(), data, sizes, level=level)
        return made

    found = over_gloo(run, ranks)
    for key, make in cases.items():
        assert_same_on_all_ranks([of_rank[key] for of_rank in found])
        assert_equal_updates(train(*make(), data), found[0][key])


@pytest.mark.thorough
@pytest.mark.parametrize(("level", "at"), [(0, 0), (0, 2), (1, 0), (3, 2)])
def test_processes_of_which_one_leaves_a_call_out(level: int, at: int) -> None:
    """An error on both within seconds; then both go on alike."""

    def run(group: Any) -> tuple[str, float, float]:
        num_calls = 0

        def loss(x: Tensor, y: Tensor, scale: Tensor) -> Results:
            nonlocal num_calls
            num_calls += 1
            leaves_out = group.rank == 1 and num_calls == at + 1
            return (x * y).sum() * scale if leaves_out else clip(x, y, scale)

        step, params, buffers = given(loss)
        sharded = fz.shard(step, level=level, group=group)
        part = split(batches(1)[0], [4, 4])[group.rank]
        state = sharded.init(params, buffers)
        for _ in range(at):
            state, _ = sharded(state, part)
        begin = time.monotonic()
        with pytest.raises(GroupError) as caught:
            sharded(state, part)
        seconds = time.monotonic() - begin
        _, metrics = sharded(state, part)
        return str(caught.value), seconds, float(metrics["loss"])

    found = over_gloo(run)
    assert any("fz.batch.all_rows" in text for text, _, _ in found), found
    assert max(seconds for _, seconds, _ in found) < 30
    assert len({loss for _, _, loss in found}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("level", [3, 0])
def test_a_plan_counts_rows(level: int) -> None:
    """What a rank sends, call by call, but for the hosts' words."""
    step, params, buffers = given(clip)
    part = {name: rows[:4] for name, rows in batches(1)[0].items()}

    def run(group: Any) -> list[tuple[str, float]]:
        recorded = counted(group)
        sharded = fz.shard(step, level=level, group=recorded)
        state, _ = sharded(sharded.init(params, buffers), part)
        recorded.reset()
        sharded(state, part)
        return [(c.kind, c.sent_bytes) for c in recorded.calls if c.kind != "exchange"]

    plan = fz.plan(params, step, level=level, ranks=2, batch=part, buffers=buffers)
    planned = [(c.kind, c.sent_bytes) for c in plan.collectives]
    assert planned == run_ranks(run, 2)[0]
    assert planned.count(("reduce_scatter", 4 * 8 * 8.0)) == 2
