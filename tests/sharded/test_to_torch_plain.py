"""An optimizer for torch's engine on a plain module, beside torch's own."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from functorch_zero import optim
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.groups import launch
from tests.sharded.test_to_torch import (
    HALF,
    STEPS,
    TRANSFORMS,
    batches,
    build,
    error_of,
    expected,
    loss_of,
    train,
)
from tests.tiers import thinned, tiers


@pytest.mark.parametrize("name", thinned(TRANSFORMS))
def test_a_plain_model(name: str) -> None:
    model = build()
    train(model, optim.to_torch(TRANSFORMS[name][0](), model), 0, 1, range(STEPS))
    assert error_of(model, expected(name)) < TRANSFORMS[name][1]


# In one process: no ranks are needed for these


def adamw(lr: Any) -> optim.Transform:
    return optim.adamw(lr, weight_decay=0.1)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def leaves_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_a_step_leaves_no_tensors_behind() -> None:
    """Those of an optimizer without a kernel, which makes new updates."""
    model = build()
    optimizer = optim.to_torch(optim.lion(0.1), model)
    counts = []
    for i in range(2):
        train(model, optimizer, 0, 1, range(2 * i, 2 * i + 2))
        counts.append(sum(type(x) is Tensor for x in gc.get_objects()))
    assert counts[0] == counts[1]


def assert_like_torch(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q, first in zip(
        ours.parameters(), theirs.parameters(), build().parameters(), strict=True
    ):
        torch.testing.assert_close(p - first, q - first, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=9, cycle_momentum=False
        ),
    ],
    ids=["step", "one cycle"],
)
def test_torchs_schedulers_change_the_rate(scheduler: Any) -> None:
    models = build(), build()
    optimizers = optim.to_torch(adamw, models[0], lr=0.1), torch_adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        schedule = scheduler(optimizer)
        for batch in batches():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
    assert_like_torch(*models)


def test_a_closure() -> None:
    models = build(), build()
    optimizers = optim.to_torch(adamw, models[0], lr=0.1), torch_adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batches(1)[0])
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    assert_like_torch(*models)


@pytest.mark.parametrize("name", tiers(["clip+adamw", "adafactor"], ["soap", "lamb"]))
def test_resting_params_are_as_if_frozen(name: str) -> None:
    """In no norm, and with no count."""
    make, _ = TRANSFORMS[name]
    frozen, resting = build(), build()
    frozen.embed.requires_grad_(False)
    for model in (frozen, resting):
        optimizer = optim.to_torch(make(), model)
        for batch in batches():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            resting.embed.weight.grad = None
            optimizer.step()
    for p, q in zip(leaves_of(frozen), leaves_of(resting), strict=True):
        assert torch.equal(p, q)


def test_a_param_that_comes_back_is_refused_where_all_share_a_norm() -> None:
    model = build()
    optimizer = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model)
    for n, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if n == 1:
            model.head.bias.grad = None
        if n < 2:
            optimizer.step()
    before = leaves_of(model)
    with pytest.raises(StructureError, match=r"path head\.bias.*none in 1 of them.*apply_if_nonz"):
        optimizer.step()
    assert all(map(torch.equal, before, leaves_of(model)))


@pytest.mark.parametrize("name", thinned(TRANSFORMS))
def test_params_and_gradients_stay_torchs_own(name: str) -> None:
    """Users look at gradients after a step, and may write to both: no state lies in them."""
    model = build()
    optimizer = optim.to_torch(TRANSFORMS[name][0](), model)
    params: list[Any] = [*model.parameters()]
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before = [param.grad.clone() for param in params]
        optimizer.step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))
        theirs = [x.untyped_storage().data_ptr() for p in params for x in (p, p.grad)]
        for tensors in optimizer.state.values():
            for key, x in tensors.items():
                assert x.untyped_storage().data_ptr() not in theirs, key


def test_params_that_lie_otherwise_in_memory() -> None:
    """A piece is a copy then, to which no kernel may write."""
    models = build(), build()
    for model in models:
        weight = model.blocks[0].gate.weight
        weight.data = weight.data.t().contiguous().t()
    optimizers = optim.to_torch(adamw, models[0], lr=0.1), torch_adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 0, 1, range(STEPS))
    assert_like_torch(*models)


# Hooks


def test_hooks_of_state_dicts_are_called_as_torchs() -> None:
    """In torch's order; a hook may give another state dict."""
    seen: list[str] = []

    def note(word: str, result: Any = None) -> Callable[..., Any]:
        def hook(optimizer: Any, *saved: Any) -> Any:
            seen.append(f"{word} {len(saved)}")
            return result

        return hook

    def with_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
        train(model, optimizer, 0, 1, range(1))
        seen.clear()
        optimizer.register_state_dict_pre_hook(note("before"))
        optimizer.register_state_dict_post_hook(note("second"))
        optimizer.register_state_dict_post_hook(note("first"), prepend=True)
        handle = optimizer.register_state_dict_post_hook(note("other", {"of": "a hook"}))
        assert optimizer.state_dict() == {"of": "a hook"}
        handle.remove()
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.5
        optimizer.register_load_state_dict_pre_hook(note("load"))
        optimizer.register_load_state_dict_pre_hook(note("load it", saved))
        optimizer.register_load_state_dict_post_hook(note("loaded"))
        given = {"of": "a hook"}
        optimizer.load_state_dict(given)
        assert optimizer.param_groups[0]["lr"] == 0.5 and given == {"of": "a hook"}
        return [*seen]

    model = build()
    expected = with_hooks(torch_adamw(model))
    for name in ("clip+adamw", "soap"):
        rate = optim.to_torch(lambda lr, name=name: TRANSFORMS[name][0](), model, lr=0.1)
        assert with_hooks(rate) == expected


@pytest.mark.parametrize("name", thinned(TRANSFORMS))
def test_a_state_dict_goes_on(name: str) -> None:
    make, bound = TRANSFORMS[name]
    first = build()
    optimizer = optim.to_torch(make(), first)
    train(first, optimizer, 0, 1, range(HALF))
    saved = copy.deepcopy(optimizer.state_dict())
    second = build()
    second.load_state_dict(first.state_dict())
    again = optim.to_torch(make(), second)
    again.load_state_dict(saved)
    train(second, again, 0, 1, range(HALF, STEPS))
    assert error_of(second, expected(name)) < bound


def test_a_learning_rate_in_a_tensor_is_not_shared_with_what_was_loaded() -> None:
    """As in torch, whose schedulers write to it in place."""
    model = build()
    for make in (torch_adamw, lambda model: optim.to_torch(adamw, model, lr=0.1)):
        first, second = make(model), make(model)
        first.param_groups[0]["lr"] = torch.tensor(0.2)
        second.load_state_dict(first.state_dict())
        first.param_groups[0]["lr"].fill_(0.3)
        assert float(second.param_groups[0]["lr"]) == float(torch.tensor(0.2))


def test_a_state_dict_has_torchs_form() -> None:
    model = build()
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    train(model, optimizer, 0, 1, range(2))
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    names = [name for name, _ in model.named_parameters()]
    assert (group["lr"], group["param_names"]) == (0.1, names)
    for n, param in enumerate(model.parameters()):
        assert saved["state"][n]["0.mu"].shape == param.shape
        assert int(saved["state"][n]["num_steps"]) == 2
        # Each param may have counts of its own
        assert int(saved["state"][n]["0.count"]) == 2
    model = build()
    saved = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model).state_dict()
    # Here they are of all params, and lie under the first one in the order of paths
    (first,) = [n for n, tensors in saved["state"].items() if "1.0.count" in tensors]
    assert first == names.index("blocks.0.down.weight")


def without(saved: dict[str, Any], key: str) -> dict[str, Any]:
    del saved["state"][0][key]
    return saved


def of_another_shape(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["state"][0][key] = saved["state"][0][key][:1]
    return saved


def of_another_dtype(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["state"][0][key] = saved["state"][0][key].float()
    return saved


def with_one_more(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["state"][0]["nu"] = saved["state"][0][key]
    return saved


def of_other_params(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["param_groups"][0]["param_names"][0] = "token"
    return saved


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without, r"path 0\.mu of embed\.weight, expected a tensor of shape \(13, 8\), .*got none"),
        (of_another_shape, r"path 0\.mu of embed\.weight, .*got one of shape \(1, 8\)"),
        (of_another_dtype, r"path 0\.mu of embed\.weight, .*got .*torch\.float32"),
        (with_one_more, r"path nu of embed\.weight"),
        (of_other_params, r"path embed\.weight"),
    ],
)
def test_another_state_is_refused(change: Any, error: str) -> None:
    model = build()
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    train(model, optimizer, 0, 1, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StructureError, match=error):
        optimizer.load_state_dict(change(copy.deepcopy(before), "0.mu"))
    after = optimizer.state_dict()
    for n, tensors in before["state"].items():
        assert all(torch.equal(x, after["state"][n][key]) for key, x in tensors.items())


def test_wrong_arguments() -> None:
    model = build()
    own: Any
    for own in (
        lambda: optim.to_torch(optim.adamw(1e-3), model, lr=0.1),
        lambda: optim.to_torch(optim.adamw, model),
        lambda: optim.to_torch(torch.optim.AdamW, model, lr=0.1),
        lambda: optim.to_torch(adamw, model.parameters(), lr=0.1),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="Remedy"):
            own()
    twice = [("a", model.head.weight), ("b", model.head.weight)]
    with pytest.raises(StructureError, match="path b, got the same param as a"):
        optim.to_torch(adamw, twice, lr=0.1)
    same_name = [("a", model.head.weight), ("a", model.head.bias)]
    with pytest.raises(StructureError, match="path a, got the same name as a"):
        optim.to_torch(adamw, same_name, lr=0.1)
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    with pytest.raises(NotImplementedError, match=r"optim\.partition"):
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_names_are_those_of_the_plain_module() -> None:
    """By which masks choose: torch.compile's and checkpointing's wrappers put others before."""
    plain = build()
    model = build()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[assignment]
    for wrapped in (model, torch.compile(model, backend="eager")):
        optimizer = optim.to_torch(adamw, wrapped, lr=0.1)  # type: ignore[arg-type]
        names = optimizer.param_groups[0]["param_names"]
        assert names == [name for name, _ in plain.named_parameters()]


@pytest.mark.thorough
def test_a_compiled_step() -> None:
    models = build(), build()
    for model in models:
        optimizer = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model)
        step = optimizer.step
        if model is models[1]:
            step = torch.compile(optimizer.step, backend="eager")
        for batch in batches(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            step()
    assert all(map(torch.equal, leaves_of(models[0]), leaves_of(models[1])))


def train_by_a_kernel() -> None:
    models = build(), build()
    lion = optim.chain(optim.scale_by_lion(), optim.scale_by_learning_rate(1e-3))
    for model, end in zip(models, (lion, optim.compiled(lion)), strict=True):
        chain = optim.chain(optim.clip_by_global_norm(1.0), end)
        train(model, optim.to_torch(chain, model), 0, 1, range(3))
    torch.testing.assert_close(leaves_of(models[0]), leaves_of(models[1]))


@pytest.mark.thorough
def test_a_compiled_transform() -> None:
    """torch.compile refused views of params that require gradients. In a process of its own, with
    which inductor's helpers end."""
    launch(train_by_a_kernel, 1, start_method="fork", timeout=100)


def test_what_nothing_reads_is_refused() -> None:
    """Settings in param groups, an emptied state, and a rate of another kind were ignored."""
    model = build()
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    train(model, optimizer, 0, 1, range(1))
    with pytest.raises(AttributeError, match="a new optimizer"):
        optimizer.state = {}  # type: ignore[assignment]
    own = optim.to_torch(optim.adamw(0.1), build())
    with pytest.raises(StructureError, match=r"path lr of param_groups, .*transform's own rate"):
        optimizer.load_state_dict(own.state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(ValueError, match=r"weight_decay .*nothing reads it.*got 0\.5"):
        optimizer.step()


def test_a_lie_is_found_at_construction() -> None:
    def centre(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u - u.mean(), updates), state

    with pytest.raises(TransformError, match="mean"):
        optim.to_torch(optim.pointwise(lambda params: (), centre), build())


def test_a_rate_of_its_own_is_not_changed_from_outside() -> None:
    model = build()
    optimizer = optim.to_torch(optim.adamw(0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    scheduler.step()
    with pytest.raises(ValueError, match=r"expected 1\.0, got 0\.1.*lr=\.\.\."):
        optimizer.step()


def test_a_gradient_of_a_param_that_it_lacks_is_refused() -> None:
    unfrozen = build()
    unfrozen.embed.requires_grad_(False)
    replaced = build()
    for model, path in ((unfrozen, r"embed\.weight"), (replaced, r"head\.weight")):
        optimizer = optim.to_torch(adamw, model, lr=0.1)
        model.embed.requires_grad_(True)
        if model is replaced:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(StructureError, match=f"path {path}.*optim.to_torch after"):
            optimizer.step()


def test_params_in_the_group_may_be_replaced_before_the_first_step() -> None:
    """As accelerate does; and not later."""
    model, other = build(), build()
    optimizer = optim.to_torch(adamw, dict(model.named_parameters()), lr=0.1)
    optimizer.param_groups[0]["params"] = [*other.parameters()]
    train(other, optimizer, 0, 1, range(STEPS))
    theirs = build()
    train(theirs, torch_adamw(theirs), 0, 1, range(STEPS))
    assert_like_torch(other, theirs)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    with pytest.raises(StructureError, match="after the first step"):
        optimizer.step()
