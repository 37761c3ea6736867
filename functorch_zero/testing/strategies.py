"""Hypothesis strategies for property tests: trees, numbers of ranks, models with batches,
optimizers.

A property test draws a model, an optimizer and batches, and proves the step on drawn ranks:

>>> from hypothesis import given, settings
>>> from functorch_zero.testing import assert_sharded_equals_unsharded
>>> @settings(max_examples=2, deadline=None, derandomize=True, database=None)
... @given(data=st.data())
... def test_any_step_on_any_ranks(data):
...     case, num_ranks = data.draw(modules(["mlp", "shared"])), data.draw(world_sizes(3))
...     optimizer = data.draw(optimizers(["adamw", "clip + lamb"]))
...     step, params, buffers = case.step(optimizer.make())
...     drawn = data.draw(batches(case, num_ranks))
...     assert_sharded_equals_unsharded(
...         step, params, buffers, drawn, levels=[3], ranks=[num_ranks]
...     )
>>> test_any_step_on_any_ranks()

Hostile cases are drawn by default: empty leaves, scalars, more ranks than elements, dims that no
number of ranks divides. Everything drawn is made from a seed, so a failing example repeats.

Needs Hypothesis, which nothing else in functorch_zero imports:
    `pip install 'functorch-zero[test]'`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..tree import PyTree

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "functorch_zero.testing.strategies needs Hypothesis. Remedy: pip install "
        "'functorch-zero[test]'"
    ) from error

from .. import optim
from ..optim.base import Transform
from . import models
from .models import Batch, Case

FLOATS = (torch.float64, torch.float32)
# Hardly any number of ranks divides these, and few leaves have more elements than there are ranks
DIMS = (1, 2, 3, 5, 7)
HOSTILE_SHAPES = (
    (),  # a scalar
    (1,),
    (0,),  # empty
    (2,),  # fewer elements than most numbers of ranks
    (3,),
    (1, 1),
    (3, 0),  # empty, and yet with rows
    (1, 7),
    (7, 1),
    (2, 1, 3),
)
LEARNING_RATE = 0.01  # large enough to move params visibly in a few steps
# These amplify round-off where something, such as a gradient matrix, lacks full rank
AMPLIFYING = {"adabelief", "full_matrix_adagrad", "shampoo", "soap"}

_DIM = st.sampled_from(DIMS)
_SEED = st.integers(0, 2**16)
_SMALL_WIDTH = st.sampled_from([2, 3, 5])


# Trees


def shapes(max_dims: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dims: 0-d, of one element, of none, of fewer elements than ranks,
    and larger ones."""
    hostile = [shape for shape in HOSTILE_SHAPES if len(shape) <= max_dims]
    return st.one_of(st.sampled_from(hostile), _dims(1, max_dims))


def _dims(fewest: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(_DIM, min_size=fewest, max_size=most).map(tuple)


@st.composite
def leaves(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = FLOATS, max_dims: int = 4
) -> Tensor:  # of a drawn shape, on the CPU
    """Tensors of normal random values, one in four of them frozen (without `requires_grad`)."""
    shape = draw(shapes(max_dims))
    dtype = draw(st.sampled_from(list(dtypes)))
    generator = torch.Generator().manual_seed(draw(_SEED))
    trained = draw(st.sampled_from([True, True, True, False]))
    # Drawn in float64, so that a leaf has the same values, rounded, in every dtype
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(dtype).requires_grad_(trained)


@st.composite
def trees(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = FLOATS,
    max_leaves: int = 8,
    max_dims: int = 4,
) -> PyTree[Tensor]:
    """Params-like trees: dicts, lists and tuples of `leaves`, with None among them; at least one
    leaf is trained."""
    leaf = leaves(dtypes, max_dims)
    # None among leaves: optree counts it as no leaf, and layouts must too
    nested = st.recursive(st.one_of(leaf, st.none()), _containers, max_leaves=max_leaves)
    # A second leaf of its own, so that a tree of None alone has one
    drawn, last = draw(nested), draw(leaf)
    # Nothing trained would leave nothing to compare
    if not any(x.requires_grad and x.numel() for x in optree.tree_leaves([drawn, last])):
        last = torch.arange(1.0, 7.0, dtype=last.dtype, device="cpu").view(2, 3).requires_grad_()
    return {"drawn": drawn, "last": last}


def _containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Dicts, lists and tuples of one to three items, each drawn from `inside`."""
    keys = st.sampled_from(["a", "b", "c", "weight"])
    dicts = st.dictionaries(keys, inside, min_size=1, max_size=3)
    lists = st.lists(inside, min_size=1, max_size=3)
    return st.one_of(dicts, lists, lists.map(tuple))


def world_sizes(max_ranks: int = 5) -> st.SearchStrategy[int]:
    """Numbers of ranks, one included."""
    return st.integers(1, max_ranks)


# Models with their batches


def modules(kinds: Sequence[str] | None = None) -> st.SearchStrategy[Case]:
    """Models with their losses and batches: `case.step(optimizer)`, `case.batches(num, rows)`,
    `case.module()`.

    Args:
        kinds: of "mlp", "frozen_mlp", "gpt", "convnet", "shared", "unused", "scalars", "mixed";
            None for all.
    """
    return st.one_of([_STRATEGY_OF_KIND[kind] for kind in kinds or _STRATEGY_OF_KIND])


def _gpt(head_width: int, heads: int, **others: Any) -> Case:
    return models.gpt(width=head_width * heads, heads=heads, **others)


_STRATEGY_OF_KIND: dict[str, st.SearchStrategy[Case]] = {
    "mlp": st.builds(models.mlp, _dims(2, 4), _SEED),
    # The model has at least three layers
    "frozen_mlp": st.builds(models.frozen_mlp, _dims(4, 5), _SEED),
    "gpt": st.builds(
        _gpt,
        # Odd, so that heads don't fall on the borders of pieces
        head_width=st.sampled_from([3, 5]),
        heads=st.sampled_from([1, 2]),
        vocab=st.sampled_from([5, 11]),
        depth=st.integers(1, 2),
        length=_SMALL_WIDTH,
        tied=st.booleans(),
        seed=_SEED,
    ),
    "convnet": st.builds(
        models.convnet,
        channels=st.integers(1, 4),
        kernel=st.sampled_from([2, 3]),
        classes=_SMALL_WIDTH,
        size=st.sampled_from([5, 6]),  # rows and columns of an image
        seed=_SEED,
    ),
    "shared": st.builds(models.shared, _SMALL_WIDTH, _SEED),
    "unused": st.builds(models.unused, _DIM, _SEED),
    "scalars": st.builds(models.scalars, _SEED),
    "mixed": st.builds(models.mixed, _SMALL_WIDTH, _SEED),
}


@st.composite
def batches(
    draw: st.DrawFn, case: Case, ranks: int, *, max_steps: int = 3, weighted: bool = False
) -> list[Batch]:
    """Whole batches for a case that `ranks` ranks can split: equally, or, if the loss is
    `weighted`, unequally too."""
    num_batches = draw(st.integers(min(2, max_steps), max_steps))
    fewest = ranks * case.min_rows
    if weighted:
        num_rows = draw(st.integers(fewest, 3 * fewest + ranks))
    else:
        num_rows = fewest * draw(st.integers(1, 3))  # as many rows for each rank
    return case.batches(num_batches, num_rows, draw(_SEED))


# Optimizers


class NamedOptimizer(NamedTuple):
    """An optimizer's name, and a function that makes it."""

    name: str
    make: Callable[[], Transform]

    def __repr__(self) -> str:
        return self.name


def optimizers(names: Sequence[str] | None = None) -> st.SearchStrategy[NamedOptimizer]:
    """Optimizers with `name` and `make()`.

    Args:
        names: of `known_optimizers`. None: all but those in `AMPLIFYING`, which are for
            `allow_round_off=True`.
    """
    known = known_optimizers()
    return st.sampled_from([known[name] for name in names or sorted(known.keys() - AMPLIFYING)])


def known_optimizers() -> dict[str, NamedOptimizer]:
    """Every function of `functorch_zero.optim` that makes an optimizer from a learning rate, and
    some chains."""
    # By signature, so that a new optimizer is drawn without being listed here
    makers: dict[str, Callable[[], Transform]] = {
        name: partial(function, LEARNING_RATE)
        for name, function in public_functions().items()
        # A part of a chain is no optimizer by itself
        if not name.startswith("scale_by_") and _needs_only_a_rate(function)
    }
    makers |= {
        # Its own first estimate of a rate, 1e-6, would hardly move a param in a few steps
        "prodigy": partial(optim.prodigy, 1.0, estim_lr0=LEARNING_RATE),
        "sgd, momentum": partial(optim.sgd, LEARNING_RATE, momentum=0.9),
        "clip + adamw": partial(_clipped, optim.adamw),
        "clip + lamb": partial(_clipped, optim.lamb),
    }
    return {name: NamedOptimizer(name, make) for name, make in makers.items()}


def public_functions() -> dict[str, Any]:
    """The public names of `functorch_zero.optim` and of `optim.contrib`, in one dict, and those of
    `optim.rows` as `rows.sgd`."""
    core = {name: getattr(optim, name) for name in optim.__all__}
    contrib = {name: getattr(optim.contrib, name) for name in optim.contrib.__all__}
    by_rows = {f"rows.{name}": getattr(optim.rows, name) for name in optim.rows.__all__}
    return core | contrib | by_rows


def _needs_only_a_rate(function: Any) -> bool:
    """Whether this is a function with an argument `learning_rate`, and requires no other."""
    if not inspect.isfunction(function):
        return False
    parameters = inspect.signature(function).parameters
    required = {name for name, p in parameters.items() if p.default is p.empty}
    return "learning_rate" in parameters and required <= {"learning_rate"}


def _clipped(make: Callable[[float], Transform]) -> Transform:
    return optim.chain(optim.clip_by_global_norm(0.1), make(LEARNING_RATE))
