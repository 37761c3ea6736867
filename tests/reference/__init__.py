"""One oracle per optimizer, written from its paper: NumPy, float64, whole tensors, slow and clear.

An oracle is called `oracle(t, gradients, params) -> updates`, with dicts of arrays and the number
of steps before this one. `trajectory` runs one, `run` runs a transform, on the same params and
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero.groups.threads import ThreadGroup, run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.optim import Transform
from functorch_zero.optim.local import Local
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.testing.slicing import slice_tree

Arrays = dict[str, np.ndarray]
Oracle = Callable[[int, Arrays, Arrays], Arrays]

HOSTILE = {
    "matrix": (6, 5),
    "tall": (9, 1),
    "thin": (1, 7),
    "vector": (5,),
    "scalar": (),
    "stack": (3, 4, 5),
    "kernel": (4, 3, 2, 2),
    "one": (1,),
}


def tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, scale: float = 1.0
) -> dict[str, Tensor]:
    """Normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(s, generator=generator, dtype=torch.float64)
        for name, s in shapes.items()
    }


def gradients_for(
    shapes: Mapping[str, tuple[int, ...]], num_steps: int = 6
) -> list[dict[str, Tensor]]:
    """A gradient per step, of different sizes."""
    return [tensors(shapes, 100 + t, 0.1 * (1 + t)) for t in range(num_steps)]


def falling(t: Any) -> Any:
    """A schedule, for a step count (0-d tensor) or a number of steps."""
    t = t.double() if isinstance(t, Tensor) else float(t)
    return 0.05 / (1 + 0.3 * t)


def decay(t: Any) -> Any:
    """A schedule of weight decay."""
    return 4 * falling(t)


def run(
    transform: Transform, params: Any, gradients: Sequence[Any], across: Any = None
) -> list[Any]:
    """The updates of each step; checks that nothing given is changed."""
    across = Local(params) if across is None else across
    state, steps = transform.init(params, across), []
    for g in gradients:
        before = [
            (x, x._version, x.clone()) for tree in (g, params, state) for x in tensors_of(tree)
        ]
        updates, state = transform.update(g, state, params, across)
        for x, version, value in before:
            assert x._version == version and torch.equal(x.nan_to_num(), value.nan_to_num()), (
                "an input was changed"
            )
        shared = {x.data_ptr() for tree in (g, params) for x in tensors_of(tree) if x.numel()}
        assert not any(x.data_ptr() in shared for x in tensors_of(state) if x.numel()), (
            "the state aliases an input"
        )
        steps.append(updates)
        params = tree_map(torch.add, params, updates)
    return steps


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, tree)
    return found


def trajectory(
    oracle: Oracle, params: Mapping[str, Tensor], gradients: Sequence[Mapping[str, Tensor]]
) -> list[Arrays]:
    """The updates of each step of an oracle."""
    now, steps = {k: p.numpy().copy() for k, p in params.items()}, []
    for t, g in enumerate(gradients):
        updates = oracle(
            t, {k: x.numpy().copy() for k, x in g.items()}, {k: p.copy() for k, p in now.items()}
        )
        steps.append(updates)
        now = {k: now[k] + updates[k] for k in now}
    return steps


def as_tensor(x: Any) -> Tensor:
    """A tensor, from one or from an array of NumPy or JAX."""
    return x if isinstance(x, Tensor) else torch.as_tensor(np.array(x))


def assert_same(
    steps: Sequence[Mapping[str, Tensor]], expected: Sequence[Any], tolerance: float = 1e-12
) -> None:
    """Each leaf's update is the expected one, relative to its norm; expected updates are not zero
    throughout."""
    assert len(steps) == len(expected) >= 5
    for name in steps[0]:
        wanted = [as_tensor(step[name]) for step in expected]
        if wanted[0].numel():
            assert any(w.norm() > 0 for w in wanted), (
                f"{name}: the expected update is zero throughout"
            )
        for t, (step, w) in enumerate(zip(steps, wanted, strict=True)):
            assert step[name].shape == w.shape, (name, step[name].shape, w.shape)
            error = (step[name] - w).norm().item()
            assert error <= tolerance * w.norm().item() + 1e-300, (
                f"{name}, step {t}: {error / w.norm().item():.2e}"
            )


def run_on(ranks: int, transform: Transform, params: Any, gradients: Sequence[Any]) -> list[Any]:
    """`run` on pieces, by thread ranks; each step's updates put together again."""
    layout = make_layout(params, ranks, trainable=lambda path, leaf: True)

    def one(group: ThreadGroup) -> list[Any]:
        def pieces(tree: Any) -> Any:
            return slice_tree(tree, layout, group.rank)

        across = Sharded(layout, group)
        return run(transform, pieces(params), [pieces(g) for g in gradients], across)

    by_rank = run_ranks(one, ranks)
    return [
        tree_map(
            lambda p, *parts: torch.cat([x.reshape(-1) for x in parts]).reshape(p.shape),
            params,
            *parts,
        )
        for parts in zip(*by_rank, strict=True)
    ]


def assert_sharded(
    transform: Transform,
    params: Any,
    gradients: Sequence[Any],
    tolerance: float = 1e-12,
    ranks: Sequence[int] = (1, 2, 3, 5),
) -> None:
    """On each of these numbers of ranks as in one process."""
    whole = [dict(enumerate(tensors_of(step))) for step in run(transform, params, gradients)]
    for size in ranks:
        pieces = [
            dict(enumerate(tensors_of(step))) for step in run_on(size, transform, params, gradients)
        ]
        assert_same(pieces, whole, tolerance)
