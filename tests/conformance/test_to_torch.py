"""Every row of the conformance table as torch's optimizer, of DTensors on two ranks, beside one
process; and by hand, where DTensors are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import launch
from tests.conformance.table import POINTWISE, STATISTICS, WHOLE, WRAPPERS
from tests.tiers import tiers

F64 = torch.float64
ROWS = POINTWISE | STATISTICS | WHOLE | WRAPPERS
SHAPES = {"a": (7, 5), "b": (5,), "c": (4, 6), "d": (1, 3)}  # rank 1 has nothing of d
STEPS = 3


def draw(g: torch.Generator) -> dict[str, Tensor]:
    return {k: torch.randn(shape, generator=g, dtype=F64) for k, shape in SHAPES.items()}


def in_one_process(transform: optim.Transform, params: Any, grads: Any) -> dict[str, Tensor]:
    params = {path: leaf.clone().requires_grad_() for path, leaf in params.items()}
    state = transform.init(params)
    for grad in grads:
        params, state = transform.apply(grad, state, params)
    return {path: leaf.detach() for path, leaf in params.items()}


def as_torchs(transform: optim.Transform, params: Any, grads: Any) -> dict[str, Tensor]:
    params = {path: nn.Parameter(leaf) for path, leaf in params.items()}
    optimizer = optim.to_torch(transform, params)
    for grad in grads:
        for path, param in params.items():
            param.grad = grad[path]
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return {path: param.full_tensor().detach() for path, param in params.items()}


def on_dtensors(names: list[str]) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2,))

    def cut(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {path: distribute_tensor(leaf, mesh, [Shard(0)]) for path, leaf in tree.items()}

    found = {}
    for name in names:
        g = torch.Generator().manual_seed(0)
        params, grads = draw(g), [draw(g) for _ in range(STEPS)]
        given = cut(params), [*map(cut, grads)]
        with pytest.raises(StructureError, match=r"path a, .*optim\.to_torch"):
            in_one_process(ROWS[name].make(), *given)
        wanted = in_one_process(ROWS[name].make(), params, grads)
        got = as_torchs(ROWS[name].make(), *given)
        found[name] = 0.0
        for path, leaf in wanted.items():
            moved = (leaf - params[path]).abs().max().clamp(min=1e-300)
            found[name] = max(found[name], float((got[path] - leaf).abs().max() / moved))
    return found


@pytest.mark.parametrize(
    "names",
    tiers(full=[[*ROWS][k::4] for k in range(4)]),
    ids=range(4),
)
def test_dtensors_beside_one_process(names: list[str]) -> None:
    for found in launch(on_dtensors, 2, names, start_method="fork", timeout=100):
        assert found.keys() == {*names}
        assert not {name: error for name, error in found.items() if error > 1e-11}
