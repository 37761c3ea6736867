"""A raw collective inside a torch.func transform raises, where torch would differentiate it to zero."""

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, vmap

import functorch_zero as fz
from functorch_zero import optim


def apply_raw(transform):
    """The message that a loss with a raw all-reduce inside `transform` ends with."""
    group = fz.ProcessGroup()

    def inner(x, w):
        y = x * w
        dist.all_reduce(y)
        return (y**2).sum()

    def loss_fn(params, buffers, batch):
        return transform(inner)(batch, fz.gather(params)["w"]).sum()

    step = fz.shard(fz.train_step(loss_fn, optim.sgd(0.1)), level=3, group=group)
    state = step.init({"w": torch.ones(3, requires_grad=True)})
    with pytest.raises(RuntimeError) as error:
        step(state, torch.ones(3))
    return str(error.value)


def per_row(inner):
    return vmap(inner, in_dims=(None, 0))


@pytest.mark.parametrize("transform", [grad, per_row])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_raw_collective_inside_a_transform_raises(transform, ranks):
    for message in fz.launch(apply_raw, ranks, transform, start_method="fork", timeout=60):
        assert "inside a torch.func transform" in message and "Remedy" in message


def outside():
    fz.ProcessGroup()
    x = torch.ones(2)
    dist.all_reduce(x)
    return x.tolist()


def test_outside_of_transforms_collectives_are_as_ever():
    assert fz.launch(outside, 2, start_method="fork", timeout=60) == [[2.0, 2.0]] * 2
