"""Mixed precision: what each dtype of a policy does, sharded = unsharded for each, bytes counted,
what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import NonFiniteError, StructureError
from functorch_zero.groups import CountingGroup, ProcessGroup, launch, run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.model.casting import CastParams
from functorch_zero.model.functionalize import functionalize
from functorch_zero.precision import Dtypes, Precision
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.grad_mean import loss_seed_of
from functorch_zero.step.loss import Outcome
from functorch_zero.step.program import GradientOptions
from functorch_zero.step.train import TrainStep, train_step
from functorch_zero.testing import Equality, assert_sharded_equals_unsharded, models
from functorch_zero.testing.models import GPT, Block
from tests.modules import Net, Unit, equal_layers
from tests.runtime.test_memory import LiveBytes
from tests.tiers import crossed, thinned, tiers

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LEVELS = (0, 1, 2, 3)
ROWS = 12

POLICIES: dict[str, Any] = {
    "compute": Precision(compute=BF16),
    "gather": Precision(gather=BF16),
    "gather narrower than compute": Precision(compute=F32, gather=BF16, storage=F64),
    "storage": Precision(storage=F64, compute=F32),
    "reduce wider": Precision(compute=BF16, reduce=F64),
    "norms": {"": Precision(compute=BF16), nn.LayerNorm: Precision(compute=F32)},
    "a block of its own": {
        "blocks.1": Precision(compute=BF16, output=F32),
        "head": Precision(gather=BF16),
    },
    "several dtypes in a unit": {
        "": Precision(compute=BF16),
        "blocks.*.up": Precision(storage=F64, compute=BF16),
    },
}


def gpt_step(
    precision: Any,
    optimizer: Any = None,
    *,
    tied: bool = False,
    weighted: bool = False,
    **options: Any,
) -> Any:
    """(step, params, buffers, batches) of a small GPT in float32."""
    remat = options.pop("remat", False)
    case = models.gpt(tied=tied)
    model = case.module().float()
    apply, params, buffers = fz.functionalize(model, units=Block, precision=precision, remat=remat)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, fz.Aux]:
        output, buffers = apply(params, buffers, batch["x"])
        loss = F.cross_entropy(output.float().flatten(0, 1), batch["y"].flatten())
        return loss, fz.Aux(buffers=buffers, weight=len(batch["x"]) if weighted else None)

    step = train_step(loss_fn, optimizer or optim.sgd(0.1, momentum=0.9), **options)
    return step, params, buffers, case.batches(2, ROWS)


def check(step: TrainStep, params: Any, buffers: Any, batches: Any, **options: Any) -> None:
    assert_sharded_equals_unsharded(step, params, buffers, batches, **{"per_rank": True, **options})


# What a policy says


@pytest.mark.parametrize(
    ("policy", "storage", "expected"),
    [
        (Precision(), F32, None),
        (Precision(compute=BF16), F32, Dtypes(BF16, BF16, F32)),
        (Precision(compute=F32), BF16, Dtypes(F32, BF16, BF16)),
        (Precision(compute=F16), BF16, Dtypes(F16, F16, BF16)),
        (Precision(gather=BF16), F32, Dtypes(F32, BF16, F32)),
        (Precision(compute=BF16, gather=F32, reduce=BF16), F32, Dtypes(BF16, F32, BF16)),
        (Precision(compute=F32), F32, None),
        (Precision(compute=BF16), torch.int64, None),
        (Precision(compute=BF16), torch.complex64, None),
    ],
)
def test_what_none_means(policy: Precision, storage: torch.dtype, expected: Dtypes | None) -> None:
    assert policy.dtypes(storage) == expected


@pytest.mark.parametrize("field", ["storage", "compute", "gather", "reduce", "buffers", "output"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(field: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=rf"Precision\.{field}.*expected float64, float32.*got {dtype}.*Remedy"
    ):
        Precision(**{field: dtype})


def test_rules_that_can_not_be_are_refused() -> None:
    model = GPT(5, 4, 2, 1, 3, tied=True)
    with pytest.raises(ValueError, match=r"'blcks\.\*'.*matches no module of GPT"):
        fz.functionalize(model, precision={"blcks.*": Precision()})
    with pytest.raises(
        StructureError, match=r"two policies: path embed\.weight.*at head.*same policy"
    ):
        fz.functionalize(model, precision={"head": Precision(compute=BF16)})
    with pytest.raises(TypeError, match="takes Precision"):
        fz.functionalize(model, precision={"": BF16})  # type: ignore[dict-item]


def test_the_innermost_module_named_counts() -> None:
    def seeing(name: str) -> Unit:
        def forward(net: Any, x: Tensor) -> Tensor:
            seen[name] = (net.weight.dtype, x.dtype)
            return net.weight * x

        return Unit(forward, weight=nn.Parameter(torch.ones(2)))

    def forward(net: Any, x: Tensor, mask: Tensor) -> Any:
        seen[""] = (net.listed[0].dtype, x.dtype, mask.dtype)
        return {"x": net.b(net.a(x)), "mask": mask}

    model = Net(
        forward,
        a=seeing("a"),
        b=nn.Sequential(seeing("b.0"), seeing("b.1"), nn.Dropout(0.0)),
        listed=nn.ParameterList([nn.Parameter(torch.ones(2))]),
        mean=torch.ones(2),
        count=torch.ones(2, dtype=torch.int64),
    )

    seen: dict[str, Any] = {}
    rules = {
        "": Precision(storage=F64, compute=BF16, buffers=F16, output=F32),
        Unit: Precision(compute=F16),
        "b.*": Precision(compute=F32, output=BF16),
        "b.1": Precision(),
    }
    apply, params, buffers = fz.functionalize(model, precision=rules)
    output, _ = apply(params, buffers, torch.ones(2), torch.ones(2, dtype=torch.bool))
    assert seen == {
        "": (BF16, BF16, torch.bool),
        "a": (F16, F16),
        "b.0": (F32, F32),
        "b.1": (F32, BF16),
    }
    assert (output["x"].dtype, output["mask"].dtype) == (F32, torch.bool)
    assert {path: leaf.dtype for path, leaf in params.items()} == {
        "listed.0": F64,
        "a.weight": F32,
        "b.0.weight": F32,
        "b.1.weight": F32,
    }
    assert (buffers["mean"].dtype, buffers["count"].dtype) == (F16, torch.int64)


def test_parametrized_leaves_and_their_module() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    apply, params, buffers = fz.functionalize(model, precision=Precision(compute=BF16))
    assert apply(params, buffers, torch.ones(1, 3))[0].dtype == BF16


# The oracle


def by_hand(precision: Precision, params: Any, batch: Any, model: nn.Module) -> Any:
    """Loss and gradients as plain torch gives them, in bfloat16."""
    lowered = {
        n: p.detach().to(precision.gather or BF16).to(BF16).requires_grad_()
        for n, p in params.items()
    }
    output = functional_call(model, lowered, (batch["x"].to(BF16),))
    loss = (output.float() - batch["y"]).square().mean()
    grads = torch.autograd.grad(loss, list(lowered.values()))
    return loss, [g.to(precision.reduce or F32).float() for g in grads]


@pytest.mark.parametrize("reduce", [None, BF16, F16])
def test_the_unsharded_step_is_plain_torch_in_low_precision(reduce: torch.dtype | None) -> None:
    model, precision = (
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        Precision(compute=BF16, reduce=reduce),
    )
    apply, params, buffers = fz.functionalize(model, precision=precision)
    step = train_step(
        lambda p, b, x: (apply(p, b, x["x"])[0].float() - x["y"]).square().mean(), optim.sgd(0.5)
    )
    batch = {"x": torch.randn(6, 5), "y": torch.randn(6, 3)}
    state = step.init(params, buffers)
    new, metrics = step(state, batch)
    loss, grads = by_hand(precision, params, batch, model)
    assert torch.equal(metrics["loss"], loss)
    for (path, old), g in zip(params.items(), grads, strict=True):
        assert (
            torch.equal(new.params[path], old - 0.5 * g)
            and g.any()
            and new.params[path].dtype == F32
        )


def test_apply_outside_a_step_rounds_the_same() -> None:
    model = models.gpt().module().float()
    apply, params, buffers = fz.functionalize(model, units=Block, precision=POLICIES["norms"])
    x = models.gpt().batches(1, 2)[0]["x"]
    outside, _ = apply(params, buffers, x)
    inside, _ = apply(CastParams(params).params, buffers, x)
    assert torch.equal(outside, inside) and outside.dtype == BF16
    loss = apply(params, buffers, x)[0].float().square().mean()
    assert all(
        g.dtype == F32 and g.any()
        for g in torch.autograd.grad(loss, [params["blocks.0.up.weight"]])
    )


def test_writing_to_what_the_loss_sees_is_refused() -> None:
    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            fz.unshard(params)["weight"].mul_(2)
        return apply(params, buffers, x)[0].float().mean()

    apply, params, _ = fz.functionalize(nn.Linear(3, 2), precision=Precision(compute=BF16))
    step = train_step(loss_fn, optim.sgd(0.1))
    with pytest.raises(StructureError, match="in place"):
        step(step.init(params), torch.ones(2, 3))
    for level in LEVELS:
        with pytest.raises(StructureError, match="in place"):
            sharded = shard(step, level=level, group=CountingGroup(2))
            sharded(sharded.init(params), torch.ones(2, 3))


# Sharded = unsharded


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks"), crossed(POLICIES, [3, 1], n=4))
def test_each_policy(name: str, ranks: int) -> None:
    check(*gpt_step(POLICIES[name]), ranks=(ranks,))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make", [models.mixed, models.shared, models.frozen_mlp, models.convnet, models.unused]
)
def test_each_kind_of_model(make: Callable[[], models.Case]) -> None:
    """Modules called twice, frozen and unused leaves, BatchNorm, leaves of several dtypes."""
    case = make()
    units = nn.Linear if make is models.frozen_mlp else case.units
    rules = {"": Precision(compute=BF16)} | (
        {nn.BatchNorm2d: Precision(compute=F32)} if make is models.convnet else {}
    )
    apply, params, buffers = fz.functionalize(case.module().float(), units=units, precision=rules)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, fz.Aux]:
        output, new = apply(
            params,
            buffers,
            tree_map(lambda x: x.float() if x.is_floating_point() else x, batch["x"]),
        )
        return case.criterion(output.float(), batch), fz.Aux(buffers=new)

    step = train_step(loss_fn, optim.sgd(0.05, momentum=0.9))
    options = (
        {"unused": ("single.*", *case.unused)} if make is models.mixed else {"unused": case.unused}
    )
    check(step, params, buffers, case.batches(2, ROWS), ranks=(2, 3), **options)


@pytest.mark.parametrize("ranks", thinned([2, 3]))
def test_params_kept_in_a_half_precision(ranks: int) -> None:
    case = models.mlp()
    apply, params, buffers = fz.functionalize(
        case.module(), precision=Precision(storage=BF16, compute=F32)
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return case.criterion(apply(params, buffers, batch["x"])[0], batch)

    bound = Equality(
        "approximate", 2.0**-7, "a sum of two roundings may be rounded to the next number instead"
    )
    step = train_step(loss_fn, optim.sgd(0.5))
    check(step, params, buffers, case.batches(2, ROWS), ranks=(ranks,), grade=bound)


def test_leaves_in_float16_have_room_for_weights() -> None:
    """The loss's seed is no weight, which would overflow on the way to the leaves."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        small = params["w"] * 2**-10
        return (100 * small.float() * batch).sum(), fz.Aux(weight=torch.tensor(1000.0))

    step = train_step(loss_fn, optim.sgd(1.0))
    params = {"w": torch.ones(6, dtype=F16, requires_grad=True)}
    expected = step(step.init(params), torch.ones(6))[0].params["w"]
    assert expected.isfinite().all() and not torch.equal(expected, params["w"])

    def run(group: Any) -> Tensor:
        sharded = shard(step, level=3, group=group)
        state, _ = sharded(sharded.init(params), torch.ones(6))
        return sharded.unshard(state).params["w"]

    for ranks in (1, 3):
        torch.testing.assert_close(run_ranks(run, ranks)[0], expected, rtol=0, atol=2.0**-11)


@pytest.mark.parametrize("level", thinned([3, 0, 1, 2], 4))
def test_weights_near_1_keep_float16_sums_in_range(level: int) -> None:
    """Gradients of 20, times 4096 tokens, are infinite in float16; times their ratio they aren't.
    Too large a sum is an error on all ranks where the step looks."""

    def step_with(unit: float) -> Any:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
            loss = (20 * params["w"].float() * batch.mean()).sum()
            return loss, fz.Aux(weight=2048 * len(batch) / unit)

        return train_step(loss_fn, optim.sgd(0.01), nonfinite="raise")

    params = {"w": torch.ones(6, dtype=F16, requires_grad=True)}
    batch = torch.ones(3)
    step = step_with(4096.0)
    expected = step(step.init(params), batch)[0].params["w"]

    def run(group: Any, unit: float) -> Tensor:
        sharded = shard(step_with(unit), level=level, group=group)
        state, _ = sharded(sharded.init(params), batch[:2] if group.rank else batch[2:])
        return sharded.unshard(state).params["w"]

    for got in run_ranks(lambda group: run(group, 4096.0), 2):
        torch.testing.assert_close(got, expected, rtol=0, atol=2.0**-10)
    with pytest.raises(NonFiniteError, match=r"gradient.*w"):
        run_ranks(lambda group: run(group, 1.0), 2)


def test_leaves_in_bfloat16_are_seeded_by_a_power_of_two() -> None:
    """A third, which bfloat16 rounds, would be rounded again in each operator of backward."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        x = params["w"]
        for _ in range(200):
            x = x * 1.0078125  # 1 + 2^-7
        return x.float().sum()

    params = {"w": torch.ones(6, dtype=BF16, requires_grad=True)}
    step = train_step(loss_fn, optim.sgd(1.0))
    expected = step(step.init(params), None)[0].params["w"]

    def run(group: Any) -> Tensor:
        sharded = shard(step, level=3, group=group)
        return sharded.unshard(sharded(sharded.init(params), None)[0]).params["w"]

    got = run_ranks(run, 3)[0]
    torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=0)  # one number beside


@pytest.mark.parametrize(
    ("ranks", "levels"), tiers([(2, [3])], [(2, [0, 1, 2]), (3, LEVELS)], rows=True)
)
def test_against_the_whole_batch(ranks: int, levels: Sequence[int]) -> None:
    bound = Equality(
        "approximate",
        0.06,
        "gradients of each part are rounded to bfloat16, of parts above their mean",
    )
    check(*gpt_step(POLICIES["norms"]), ranks=(ranks,), levels=levels, per_rank=False, grade=bound)


@pytest.mark.thorough
@pytest.mark.parametrize(("reduce", "ranks"), [(BF16, 3), (BF16, 2), (F16, 3)])
def test_sums_in_a_half_precision(reduce: torch.dtype, ranks: int) -> None:
    bound = Equality(
        "approximate", 0.05, "4 roundings of 2^-9, of parts that may be several times their mean"
    )
    check(*gpt_step(Precision(compute=BF16, reduce=reduce)), ranks=(ranks,), grade=bound)


def test_deferred_values_are_stored_as_the_policy_says() -> None:
    rules = {"": Precision(storage=BF16), nn.LayerNorm: Precision(storage=F64)}
    with torch.device("meta"):
        model = GPT(11, 6, 2, 2, 5, tied=True)
    step = train_step(lambda p, b, x: torch.zeros(()), optim.sgd(0.1))
    _, params, buffers = fz.functionalize(model, units=Block, precision=rules)
    values = fz.deferred_init(model, seed=3)
    plain = values.fill(fz.functionalize(model, units=Block)[1])
    expected = {path: leaf.to(params[path].dtype) for path, leaf in plain.items()}
    assert {leaf.dtype for leaf in expected.values()} == {BF16, F64}

    def run(group: Any) -> Any:
        sharded = shard(step, level=3, group=group)
        return sharded.unshard(sharded.init(params, buffers, values=values)).params

    for found in (*run_ranks(run, 2), step.init(params, buffers, values=values).params):
        for path, leaf in expected.items():
            assert torch.equal(found[path], leaf) and found[path].dtype == leaf.dtype


@pytest.mark.parametrize("level", thinned([3, 0, 1, 2]))
def test_evaluation_on_a_running_mean_rounds_as_training(level: int) -> None:
    step, params, buffers, batches = gpt_step(
        Precision(compute=BF16), optim.params_ema(optim.sgd(0.1), decay=0.5)
    )
    read = lambda state, p: optim.ema_params(state)
    loss = lambda p, b, batch: {"loss": step.loss_fn(p, b, batch)[0]}
    evaluate = fz.eval_step(loss, params=read)

    def run(group: Any) -> Tensor:
        sharded = shard(step, level=level, group=group)
        first, second = ({k: x.chunk(2)[group.rank] for k, x in batch.items()} for batch in batches)
        state, _ = sharded(sharded.init(params, buffers), first)
        return shard(evaluate, level=level, group=group)(state, second)["loss"]

    state, _ = step(step.init(params, buffers), batches[0])
    expected = evaluate(state, batches[1])["loss"]
    got = run_ranks(run, 2)[0]
    assert torch.allclose(got, expected, rtol=2e-5)  # without rounding it is 1e-4 away


EVERY_LEVEL = [*itertools.product(("norms", "reduce"), LEVELS)]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    tiers(
        thorough=[(3, [("norms", 3), ("reduce", 1)]), (2, EVERY_LEVEL)],
        full=[(3, EVERY_LEVEL)],
        rows=True,
    ),
    ids=str,
)
def test_on_processes(ranks: int, cases: list[tuple[str, int]]) -> None:
    """Over gloo, in bfloat16 and float16 on the wire, at each level."""

    def run(group: Any) -> dict[Any, Any]:
        found = {}
        for policy, level in cases:
            precision = POLICIES.get(policy) or Precision(compute=BF16, reduce=BF16)
            step, params, buffers, batches = gpt_step(precision)
            sharded = shard(step, level=level, group=group)
            state = sharded.init(params, buffers)
            for batch in batches:
                state, _ = sharded(
                    state, {k: x.chunk(group.size)[group.rank] for k, x in batch.items()}
                )
            found[policy, level] = sharded.unshard(state).params
        return found

    on_threads = run_ranks(run, ranks)
    results = launch(lambda: run(ProcessGroup()), ranks, start_method="fork", timeout=100)
    start = gpt_step(None)[1]
    for key, expected in on_threads[0].items():
        for path, old in start.items():
            update = expected[path] - old
            assert update.any()
            for got in results:
                apart = (got[key][path] - expected[path]).abs().max()
                assert apart <= (1e-5 if key[0] == "norms" else 0.05) * update.abs().max(), (
                    key,
                    path,
                )


def test_params_inside_the_loss_have_their_compute_dtype() -> None:
    case = models.mlp()
    apply, params, buffers = fz.functionalize(
        case.module().float(), precision=Precision(compute=BF16)
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        whole = fz.unshard(params)
        assert {leaf.dtype for leaf in (*params.values(), *whole.values())} == {BF16}
        penalty = sum(leaf.float().square().sum() for leaf in whole.values())
        direct = params["layers.0.weight"].float().sum()
        return (
            case.criterion(apply(params, buffers, batch["x"])[0].float(), batch)
            + 0.01 * penalty
            + 0.01 * direct
        )

    step = train_step(loss_fn, optim.sgd(0.05))
    check(step, params, buffers, case.batches(2, ROWS), ranks=(2,))
    evaluate = fz.eval_step(
        lambda p, b, x: {"norm": sum(leaf.float().norm() for leaf in fz.unshard(p).values())}
    )
    state = step.init(params)
    alone = evaluate(state, None)["norm"]

    def run(group: Any) -> list[Tensor]:
        steps = [
            (shard(step, level=k, group=group), shard(evaluate, level=k, group=group))
            for k in LEVELS
        ]
        return [e(s.init(params), None)["norm"] for s, e in steps]

    for got in run_ranks(run, 2)[0]:
        assert torch.allclose(got, alone, rtol=1e-6)


def test_derivatives_inside_the_loss() -> None:
    case = models.mlp()
    apply, params, buffers = fz.functionalize(
        case.module(), precision=Precision(compute=F32, gather=BF16)
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        f, x = (lambda v: apply(params, {}, v)[0].sum()), batch["x"].float()
        slopes, curvature = vmap(grad(f))(x), vmap(jacrev(grad(f)))(x)
        return (
            slopes.square().mean()
            + curvature.square().mean()
            + apply(params, {}, x)[0].square().mean()
        )

    step = train_step(loss_fn, optim.sgd(0.01))
    grade = Equality("approximate", 1e-5, "computed in float32")
    check(step, params, buffers, case.batches(2, ROWS), ranks=(2,), per_rank=False, grade=grade)


# Bytes


def sent(precision: Any, level: int, **options: Any) -> dict[str, float]:
    """Bytes that a rank of four sends in a step that knows the order of units, by kind."""
    apply, params, _ = fz.functionalize(equal_layers(6, 64), precision=precision)
    group = CountingGroup(4)
    step = shard(
        train_step(lambda p, b, x: apply(p, b, x)[0].float().square().mean(), optim.sgd(0.1)),
        level=level,
        group=group,
        **options,
    )
    state = step.init(params)
    for _ in range(2):
        group.reset()
        state, _ = step(state, torch.ones(2, 64))
    return {kind: group.sent_bytes(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}


@pytest.mark.parametrize(
    "policy", thinned([Precision(gather=BF16), Precision(compute=BF16), Precision(compute=F16)])
)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_gather_in_halves_moves_half_the_bytes(policy: Precision, keeps: bool) -> None:
    whole, half = (sent(p, 3, reshard_after_forward=not keeps) for p in (None, policy))
    assert whole["all_gather"] > 0 and half == {**whole, "all_gather": whole["all_gather"] / 2}


@pytest.mark.parametrize(
    ("level", "kind"),
    tiers(
        [(0, "all_reduce"), (3, "reduce_scatter")],
        [(1, "reduce_scatter"), (2, "reduce_scatter")],
        rows=True,
    ),
)
def test_a_reduction_in_halves_moves_half_the_bytes(level: int, kind: str) -> None:
    whole, half = (sent(p, level) for p in (None, Precision(reduce=BF16)))
    metrics = 2 * (2 * 32 * 8 * 3 / 4) if kind == "all_reduce" else 0
    assert whole[kind] - metrics > 0 and half == {
        **whole,
        kind: (whole[kind] - metrics) / 2 + metrics,
    }


def peak(precision: Any, level: int) -> int:
    """The most bytes that a step makes beside the state it is given."""
    apply, params, _ = fz.functionalize(equal_layers(6, 64), precision=precision)
    step = shard(
        train_step(lambda p, b, x: apply(p, b, x)[0].float().square().mean(), optim.sgd(0.1)),
        level=level,
        group=CountingGroup(64),
    )
    state, found = step.init(params), 0
    for _ in range(3):
        with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
            state, _ = step(state, torch.ones(2, 64))
        found = live.peak
    return found


@pytest.mark.thorough
def test_units_in_use_are_held_in_their_compute_dtype() -> None:
    """In units of a layer in float32: the one at work and its gradient; or, in halves, a gradient
    before and after it is multiplied by a share, and the layer on its way. A quarter is
    activations."""
    layer = 64 * 64 * 4
    whole, half = (
        peak(policy, 3) / layer for policy in (None, Precision(compute=BF16, reduce=BF16))
    )
    assert 2 < whole < 2.5 and half < 1.75, (whole, half)
    # With params whole between steps: else they are published, which all are in bfloat16
    at_level_2 = peak(Precision(compute=BF16, gather=F32, reduce=BF16), 2) / layer
    assert at_level_2 < 3, (
        "copies of a unit or two in bfloat16, not of the model, which is 3 layers' worth"
    )


def test_inference_mode() -> None:
    apply, params, _ = fz.functionalize(equal_layers(2, 8), precision=Precision(compute=BF16))
    state = train_step(lambda p, b, x: apply(p, b, x)[0].sum(), optim.sgd(0.1)).init(params)
    evaluate = fz.eval_step(lambda p, b, x: {"sum": apply(p, b, x)[0].float().sum()})
    expected = evaluate(state, torch.ones(2, 8))["sum"]
    with torch.inference_mode():
        assert torch.equal(evaluate(state, torch.ones(2, 8))["sum"], expected)
        for level in LEVELS:
            sharded = shard(
                train_step(lambda p, b, x: x, optim.sgd(0.1)), level=level, group=CountingGroup(1)
            )
            found = shard(evaluate, level=level, group=CountingGroup(1))(
                sharded.shard(state), torch.ones(2, 8)
            )
            assert torch.equal(found["sum"], expected)


def test_a_buffer_of_two_modules_has_one_dtype() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)})
    model["b"].running_mean = model["a"].running_mean
    rules = {"a": Precision(buffers=torch.float64), "b": Precision(buffers=torch.bfloat16)}
    with pytest.raises(StructureError, match=r"buffer.*path a\.running_mean,.*at b\. Remedy"):
        fz.functionalize(model, precision=rules)
    rules["b"] = Precision(buffers=torch.float64, compute=torch.float64)
    _, _, buffers = fz.functionalize(model, precision=rules)
    assert buffers["a.running_mean"].dtype is torch.float64


@pytest.mark.parametrize("loss_scale", [None, 8.0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_gradient_is_multiplied_by_one(ranks: int, loss_scale: float | None) -> None:
    """The seed carries all of a power of two, and all of a scaled loss's share. Packed gradients
    are then sent as they are, without a pass over them and without a copy of large ones."""
    _, params, _ = functionalize(nn.Linear(2, 2), precision=Precision(compute=torch.bfloat16))
    layout = make_layout(params, ranks, trainable=lambda path, leaf: True)
    outcome = Outcome(torch.ones(()), {}, {}, None)
    seed, scale = loss_seed_of(outcome, layout, ranks, GradientOptions(scale=loss_scale))
    if ranks == 3 and loss_scale is None:
        assert float(seed) == 1 / 4 and scale.factor == 4 / 3
        return
    torch.testing.assert_close(float(seed), (loss_scale or 1) / ranks)
    assert scale.factor is None
    flat = torch.ones(3)
    assert scale(flat, is_own=True) is flat and flat._version == 0
