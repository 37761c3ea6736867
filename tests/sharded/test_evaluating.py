"""`optimizer.evaluating` of `optim.to_torch`: the model has the params that the state holds to
evaluate on, wherever torch has put them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.groups import launch
from tests.sharded.test_to_torch import batches, build, loss_of, placed_on, train, whole
from tests.tiers import THOROUGH

STEPS = 3
# name -> the transform; what reads its state; and the bound of a difference
READ: dict[str, tuple[Callable[[], optim.Transform], Callable[[Any, Any], Any]]] = {
    "average": (lambda: optim.params_ema(optim.adamw(1e-2), 0.9), optim.ema_params),
    "schedule-free": (
        lambda: optim.schedule_free_adamw(1e-2),
        optim.schedule_free_eval_params,
    ),
    "average behind clipping": (
        lambda: optim.params_ema(
            optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2)), 0.9
        ),
        optim.ema_params,
    ),
}


def by_hand(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """In one process: the params, those to evaluate on, and the loss at these."""
    make, read = READ[name]
    apply, params, buffers = fz.functionalize(build())
    step = fz.train_step(lambda p, b, batch: loss_of(lambda x: apply(p, b, x)[0], batch), make())
    state = step.init(params, buffers)
    for batch in batches(STEPS):
        state, _ = step(state, batch)
    found = read(state.opt_state, state.params)
    loss = loss_of(lambda x: apply(found, state.buffers, x)[0], batches(1)[0])
    return (
        {path: x.detach() for path, x in fz.named_leaves(state.params).items()},
        {path: x.detach() for path, x in fz.named_leaves(found).items()},
        loss.detach(),
    )


def assert_params(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        expected = wanted[name.removeprefix("module.")]
        torch.testing.assert_close(whole(param), expected, rtol=1e-11, atol=1e-13)


def evaluate(kind: str, wanted: dict[str, Any]) -> None:
    for name, (params, averages, loss) in wanted.items():
        make, read = READ[name]
        model, rank, ranks = placed_on(kind) if kind else (build(), 0, 1)
        optimizer = optim.to_torch(make(), model)
        train(model, optimizer, rank, ranks, range(STEPS))
        assert any((params[path] - x).abs().max() > 1e-4 for path, x in averages.items())
        saved = copy.deepcopy(optimizer.state_dict())
        places = [param.placements for param in model.parameters() if hasattr(param, "placements")]
        with torch.no_grad():
            loss_of(model, batches(1)[0])  # from here, fully_shard's root keeps whole params
            with optimizer.evaluating(read):
                assert_params(model, averages)
                torch.testing.assert_close(loss_of(model, batches(1)[0]), loss, rtol=1e-11, atol=0)
                assert_same_state(optimizer.state_dict(), saved)
                exported = {k: whole(x).clone() for k, x in model.state_dict().items()}
            for path, x in exported.items():
                expected = averages[path.removeprefix("module.")]
                torch.testing.assert_close(x, expected, rtol=1e-11, atol=1e-13)
        assert places == [p.placements for p in model.parameters() if hasattr(p, "placements")]
        assert_same_state(optimizer.state_dict(), saved)
        # And training goes on from its own params, also where no step has come in between
        first = loss_of(model, batches(1)[0])
        plain = build()
        plain.load_state_dict(params)
        torch.testing.assert_close(first, loss_of(plain, batches(1)[0]), rtol=1e-11, atol=0)
        assert_params(model, params)


def assert_same_state(got: Any, wanted: Any) -> None:
    for n, tensors in wanted["state"].items():
        for key, x in tensors.items():
            assert torch.equal(whole(got["state"][n][key]), whole(x)), (n, key)


@pytest.mark.parametrize("name", READ)
def test_a_plain_model(name: str) -> None:
    evaluate("", {name: by_hand(name)})


def on_ranks(wanted: dict[str, Any]) -> None:
    for kind in ("ddp", "fully_shard"):
        evaluate(kind, wanted)
    # Beside its params there is no module that could keep whole ones
    model, _, _ = placed_on("fully_shard")
    optimizer = optim.to_torch(READ["average"][0](), dict(model.named_parameters()))
    with (
        pytest.raises(StructureError, match=r"path .*optim\.to_torch\(transform, model\)"),
        optimizer.evaluating(optim.ema_params),
    ):
        pass


@THOROUGH
def test_on_ranks() -> None:
    """Pieces are uneven: the head has three rows, of which rank 1 has one."""
    wanted = {name: by_hand(name) for name in READ}
    launch(on_ranks, 2, wanted, start_method="fork", timeout=100)


def test_params_with_counts_of_their_own() -> None:
    """Schedule-free's average is of the steps that a param has taken."""
    make, read = READ["schedule-free"]
    both, late, early = (
        {k: nn.Parameter(torch.ones(3)) for k in keys} for keys in ("ab", "b", "a")
    )
    optimizers = {optim.to_torch(make(), params): params for params in (both, late, early)}
    for n in range(4):
        for optimizer, params in optimizers.items():
            for path, param in params.items():
                grad = torch.full_like(param, 0.1 * (n + 1))
                param.grad = grad if (path == "a") or n > 1 else None
            optimizer.step()
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.evaluating(read))
        torch.testing.assert_close(both["a"], early["a"])
        torch.testing.assert_close(both["b"], late["b"])


def test_what_would_be_lost_or_wrong_is_refused() -> None:
    model = build()
    optimizer = optim.to_torch(READ["average"][0](), model)
    train(model, optimizer, 0, 1, range(1))
    before = [param.detach().clone() for param in model.parameters()]

    def normed(state: Any, params: Any) -> Any:
        return {path: x / x.norm() for path, x in params.items()}

    def half(state: Any, params: Any) -> Any:
        return {path: x.float() for path, x in params.items()}

    def fewer(state: Any, params: Any) -> Any:
        return {path: x for path, x in params.items() if path != "head.bias"}

    errors: list[tuple[Any, Any, str]] = [
        (normed, TransformError, "not elementwise"),
        (half, StructureError, "can't take its param's place"),
        (fewer, StructureError, r"path head\.bias"),
    ]
    for read, kind, pattern in errors:
        with pytest.raises(kind, match=pattern), optimizer.evaluating(read):
            pass
    with optimizer.evaluating(optim.ema_params):
        with pytest.raises(RuntimeError, match=r"inside optimizer\.evaluating"):
            optimizer.step()
        with (
            pytest.raises(RuntimeError, match=r"inside optimizer\.evaluating"),
            optimizer.evaluating(optim.ema_params),
        ):
            pass
    # An error inside: the params come back
    with pytest.raises(ZeroDivisionError), optimizer.evaluating(optim.ema_params):
        1 / 0  # noqa: B018
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
