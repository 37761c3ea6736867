"""A raw collective inside a torch.func transform raises, where torch would differentiate it to
zero."""

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, vmap

import functorch_zero as fz
from functorch_zero import optim
from tests.tiers import thinned


def apply_raw(transform):
    """The message that a loss with a raw all-reduce inside `transform` ends with."""
    group = fz.ProcessGroup()

    def inner(x, w):
        y = x * w
        dist.all_reduce(y)
        return (y**2).sum()

    def loss_fn(params, buffers, batch):
        return transform(inner)(batch, fz.unshard(params)["w"]).sum()

    step = fz.shard(fz.train_step(loss_fn, optim.sgd(0.1)), level=3, group=group)
    state = step.init({"w": torch.ones(3, requires_grad=True)})
    with pytest.raises(RuntimeError) as error:
        step(state, torch.ones(3))
    return str(error.value)


def per_row(inner):
    return vmap(inner, in_dims=(None, 0))


@pytest.mark.parametrize("transform", [grad, per_row])
@pytest.mark.parametrize("ranks", thinned([2, 1]))
def test_a_raw_collective_inside_a_transform_raises(transform, ranks):
    for message in fz.launch(apply_raw, ranks, transform, start_method="fork", timeout=60):
        assert "inside a torch.func transform" in message and "Remedy" in message


def inside(kind):
    """The message of a group's own collective inside a transform."""
    group = fz.ProcessGroup()
    one, two = torch.ones(2), torch.ones(4)
    calls = {
        "all_gather": lambda: group.all_gather(two, one),
        "reduce_scatter": lambda: group.reduce_scatter(one, two),
        "all_reduce": lambda: group.all_reduce(one),
        "all_reduce of much": lambda: group.all_reduce(torch.ones(100_000)),
        "all_to_all": lambda: group.all_to_all(one, [1, 1], one.clone(), [1, 1]),
        "broadcast": lambda: group.broadcast(one, 0),
        "barrier": group.barrier,
    }

    def loss(x):
        calls[kind]()
        return x.sum()

    with pytest.raises(RuntimeError) as error:
        grad(loss)(torch.ones(3))
    return str(error.value)


KINDS = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_reduce of much",
    "all_to_all",
    "broadcast",
    "barrier",
]


def inside_each():
    return {kind: inside(kind) for kind in KINDS}


def test_a_groups_collective_inside_a_transform_raises():
    for messages in fz.launch(inside_each, 2, start_method="fork", timeout=60):
        for kind, message in messages.items():
            assert "inside a torch.func transform" in message and "Remedy" in message, kind


def outside():
    fz.ProcessGroup()
    x = torch.ones(2)
    dist.all_reduce(x)
    return x.tolist()


def test_outside_of_transforms_collectives_are_as_ever():
    assert fz.launch(outside, 2, start_method="fork", timeout=60) == [[2.0, 2.0]] * 2
