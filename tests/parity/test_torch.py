"""Our updates are torch.optim's: float64, relative 1e-12, over several steps with weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch

from functorch_zero import optim
from tests.parity.cases import NUM_STEPS, assert_close, gradients, hostile_tree, run, stacked

LR = 0.1
Made = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def float64_numbers() -> Iterator[None]:
    """torch keeps NAdam's product of momenta in the default dtype; ours is float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


ROWS: dict[str, tuple[Callable[[], optim.Transform], Made]] = {
    "SGD": (
        lambda: optim.sgd(LR, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, LR, weight_decay=0.1),
    ),
    "SGD momentum": (
        lambda: optim.sgd(LR, 0.9, dampening=0.3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, LR, 0.9, 0.3, 0.1),
    ),
    "SGD nesterov": (
        lambda: optim.sgd(LR, 0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, LR, 0.9, 0, 0.1, True),
    ),
    "Adam": (
        lambda: optim.adam(LR, 0.8, 0.99, 1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, LR, (0.8, 0.99), 1e-3, 0.1),
    ),
    "AdamW": (lambda: optim.adamw(LR), lambda p: torch.optim.AdamW(p, LR)),
    "AdamW decay": (
        lambda: optim.adamw(LR, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, LR, weight_decay=0.2),
    ),
    "AMSGrad": (
        lambda: optim.amsgrad(LR, b2=0.5, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, LR, (0.9, 0.5), weight_decay=0.1, amsgrad=True),
    ),
    "AMSGrad W": (
        lambda: optim.chain(
            optim.scale_by_amsgrad(b2=0.5),
            optim.add_decayed_weights(0.1),
            optim.scale_by_learning_rate(LR),
        ),
        lambda p: torch.optim.AdamW(p, LR, (0.9, 0.5), weight_decay=0.1, amsgrad=True),
    ),
    "Adamax": (
        lambda: optim.adamax(LR, weight_decay=0.1),
        lambda p: torch.optim.Adamax(p, LR, weight_decay=0.1),
    ),
    "NAdam": (
        lambda: optim.nadam(LR, weight_decay=0.1),
        lambda p: torch.optim.NAdam(p, LR, weight_decay=0.1),
    ),
    "NAdam W": (
        lambda: optim.contrib.nadamw(LR, weight_decay=0.1),
        lambda p: torch.optim.NAdam(p, LR, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "RAdam": (
        lambda: optim.radam(LR, weight_decay=0.1),
        lambda p: torch.optim.RAdam(p, LR, weight_decay=0.1),
    ),
    "RAdam both branches": (
        lambda: optim.radam(LR, 0.9, 0.9, weight_decay=0.1),
        lambda p: torch.optim.RAdam(p, LR, (0.9, 0.9), weight_decay=0.1),
    ),
    "Adagrad": (lambda: optim.adagrad(LR), lambda p: torch.optim.Adagrad(p, LR)),
    "Adagrad all": (
        lambda: optim.adagrad(LR, 0.2, lr_decay=0.3, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, LR, 0.3, 0.1, 0.2),
    ),
    "Adadelta": (
        lambda: optim.adadelta(1.0, 0.8, weight_decay=0.1),
        lambda p: torch.optim.Adadelta(p, 1.0, 0.8, weight_decay=0.1),
    ),
    "RMSprop": (
        lambda: optim.rmsprop(LR, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, LR, weight_decay=0.1),
    ),
    "RMSprop all": (
        lambda: optim.rmsprop(LR, 0.9, centered=True, momentum=0.8, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, LR, 0.9, momentum=0.8, centered=True, weight_decay=0.1),
    ),
    "Rprop": (
        lambda: optim.contrib.rprop(0.1, 0.4, 1.3, 1e-3, 0.15),
        lambda p: torch.optim.Rprop(p, 0.1, (0.4, 1.3), (1e-3, 0.15)),
    ),
    "from_torch(AdamW)": (
        lambda: optim.from_torch(torch.optim.AdamW, lr=LR, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, LR, weight_decay=0.1),
    ),
}


def torch_updates(make: Made, params: Any, grads: list[Any]) -> list[Any]:
    """What a torch optimizer adds to the params in each step."""
    leaves, treedef = optree.tree_flatten(params)
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    optimizer = make(own)
    history = []
    for grad in grads:
        before = [p.detach().clone() for p in own]
        for p, g in zip(own, optree.tree_leaves(grad), strict=True):
            p.grad = g.clone()
        optimizer.step()
        history.append(
            treedef.unflatten([p.detach() - b for p, b in zip(own, before, strict=True)])
        )
    return history


@pytest.mark.parametrize("name", ROWS)
def test_updates_are_torchs(name: str) -> None:
    ours, theirs = ROWS[name]
    params = hostile_tree()
    grads = gradients(params, 9 if "both" in name else NUM_STEPS)
    expected = torch_updates(theirs, params, grads)
    got, _, _ = run(ours(), params, grads)
    assert_close(stacked(got), stacked(expected))


@pytest.mark.parametrize("name", ROWS)
def test_updates_of_complex_params_are_torchs(name: str) -> None:
    """Of the real and the imaginary parts, beside real params."""
    ours, theirs = ROWS[name]
    generator = torch.Generator().manual_seed(0)

    def draw() -> Any:
        c128, f64 = torch.complex128, torch.float64
        return {
            "matrix": torch.randn(4, 3, dtype=c128, generator=generator),
            "turned": torch.randn(4, 3, dtype=c128, generator=generator).mT,
            "real": torch.randn(3, 2, dtype=f64, generator=generator),
            "scalar": torch.randn((), dtype=c128, generator=generator),
        }

    params, grads = draw(), [draw() for _ in range(9 if "both" in name else NUM_STEPS)]
    expected = torch_updates(theirs, params, grads)
    got, _, _ = run(ours(), params, grads)
    for want, have in zip(expected, got, strict=True):
        for path, update in want.items():
            assert have[path].dtype == params[path].dtype
            assert torch.allclose(have[path], update, rtol=1e-9, atol=1e-12), path
    assert all(update.abs().sum() > 0 for update in expected[0].values())


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "NAdam", "Rprop", "RMSprop all"])
def test_the_comparison_can_fail(name: str) -> None:
    params = hostile_tree()
    grads = gradients(params)
    expected = torch_updates(ROWS[name][1], params, grads)
    got, _, _ = run(optim.chain(ROWS[name][0](), optim.scale(1 + 1e-9)), params, grads)
    with pytest.raises(AssertionError):
        assert_close(stacked(got), stacked(expected))


def test_a_changing_learning_rate_is_torchs() -> None:
    """torch multiplies RMSprop's momentum by the learning rate of the step; optax puts it
    inside."""
    params = hostile_tree()
    grads = gradients(params)

    def make(own: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.RMSprop(own, LR, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    got, _, _ = run(optim.rmsprop(lambda count: LR / (1 + count), momentum=0.9), params, grads)
    assert_close(stacked(got), stacked(torch_updates(make, params, grads)))
