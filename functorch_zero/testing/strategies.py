"""Hypothesis strategies: trees, world sizes, models with batches, optimizers. Hostile cases are
drawn by default.

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
# Hardly any divide, and few leaves have more elements than there may be ranks
DIMS = (
    1,
    2,
    3,
    5,
    7,
)
LEARNING_RATE = 0.01
# Round-off, where something has no full rank
AMPLIFYING = {
    "adabelief",
    "full_matrix_adagrad",
    "shampoo",
    "soap",
}


def shapes(max_dims: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dims: 0-d, of one element, of none, of fewer elements than ranks,
    and larger ones."""
    hostile = [(), (1,), (0,), (2,), (3,), (1, 1), (3, 0), (1, 7), (7, 1), (2, 1, 3)]
    drawn = st.lists(st.sampled_from(DIMS), min_size=1, max_size=max_dims).map(tuple)
    return st.one_of(st.sampled_from([s for s in hostile if len(s) <= max_dims]), drawn)


def leaves(dtypes: Sequence[torch.dtype] = FLOATS, max_dims: int = 4) -> st.SearchStrategy[Tensor]:
    """Tensors of normal random values, one in four of them frozen (without `requires_grad`)."""
    return st.builds(
        _leaf,
        shapes(max_dims),
        st.sampled_from(list(dtypes)),
        st.integers(0, 2**16),
        st.sampled_from([True] * 3 + [False]),
    )


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, seed: int, trained: bool) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(trained)


def trees(
    dtypes: Sequence[torch.dtype] = FLOATS, max_leaves: int = 8, max_dims: int = 4
) -> st.SearchStrategy[PyTree[Tensor]]:
    """Params-like trees: dicts, lists and tuples of `leaves`, with None among them; at least one
    leaf is trained."""
    below = st.one_of(leaves(dtypes, max_dims), st.none())

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.sampled_from(["a", "b", "c", "weight"])
        listed = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3), listed, listed.map(tuple)
        )

    drawn = st.recursive(below, nest, max_leaves=max_leaves)
    return st.builds(
        lambda tree, last: {"drawn": tree, "last": last}, drawn, leaves(dtypes, max_dims)
    ).map(_one_trained)


def _one_trained(tree: Any) -> Any:
    if any(leaf.requires_grad and leaf.numel() for leaf in optree.tree_leaves(tree)):
        return tree
    return {
        **tree,
        "last": torch.arange(1.0, 7.0, dtype=tree["last"].dtype).view(2, 3).requires_grad_(),
    }


def world_sizes(max_ranks: int = 5) -> st.SearchStrategy[int]:
    """Numbers of ranks, one included."""
    return st.integers(1, max_ranks)


def modules(kinds: Sequence[str] | None = None) -> st.SearchStrategy[Case]:
    """Models with their losses and batches: `case.step(optimizer)`, `case.batches(num, rows)`,
    `case.module()`.

    Args:
        kinds: of "mlp", "frozen_mlp", "gpt", "convnet", "shared", "unused", "scalars", "mixed";
            None for all.
    """
    seed, dim = st.integers(0, 2**16), st.sampled_from(DIMS)
    made: dict[str, st.SearchStrategy[Case]] = {
        "mlp": st.builds(models.mlp, st.lists(dim, min_size=2, max_size=4).map(tuple), seed),
        "frozen_mlp": st.builds(
            models.frozen_mlp, st.lists(dim, min_size=4, max_size=5).map(tuple), seed
        ),
        "gpt": st.builds(
            _gpt,
            st.sampled_from([5, 11]),
            st.sampled_from([3, 5]),
            st.sampled_from([1, 2]),
            st.integers(1, 2),
            st.sampled_from([2, 3, 5]),
            st.booleans(),
            seed,
        ),
        "convnet": st.builds(
            models.convnet,
            st.integers(1, 4),
            st.sampled_from([2, 3]),
            st.sampled_from([2, 3, 5]),
            st.sampled_from([5, 6]),
            seed,
        ),
        "shared": st.builds(models.shared, st.sampled_from([2, 3, 5]), seed),
        "unused": st.builds(models.unused, dim, seed),
        "scalars": st.builds(models.scalars, seed),
        "mixed": st.builds(models.mixed, st.sampled_from([2, 3, 5]), seed),
    }
    return st.one_of([made[kind] for kind in kinds or made])


def _gpt(
    vocab: int, per_head: int, heads: int, depth: int, length: int, tied: bool, seed: int
) -> Case:
    return models.gpt(vocab, per_head * heads, heads, depth, length, tied, seed)


def batches(
    case: Case, ranks: int, *, max_steps: int = 3, weighted: bool = False
) -> st.SearchStrategy[list[Batch]]:
    """Whole batches for a case that `ranks` ranks can split: equally, or, if the loss is
    `weighted`, unequally too."""
    fewest = ranks * case.min_rows
    rows = st.integers(1, 3).map(lambda k: k * fewest)
    if weighted:
        rows = st.integers(fewest, 3 * fewest + ranks)
    return st.builds(
        case.batches, st.integers(min(2, max_steps), max_steps), rows, st.integers(0, 2**16)
    )


class NamedOptimizer(NamedTuple):
    """An optimizer's name, and a function that makes it."""

    name: str
    make: Callable[[], Transform]

    def __repr__(self) -> str:
        return self.name


def public_functions() -> dict[str, Any]:
    """The public names of `functorch_zero.optim` and of `optim.contrib`, in one dict."""
    core = {name: getattr(optim, name) for name in optim.__all__}
    return core | {name: getattr(optim.contrib, name) for name in optim.contrib.__all__}


def known_optimizers() -> dict[str, NamedOptimizer]:
    """Every function of `functorch_zero.optim` that makes an optimizer from a learning rate, and
    some chains."""
    found = {}
    for name, make in public_functions().items():
        if inspect.isfunction(make) and not name.startswith("scale_by_") and _takes_a_rate(make):
            found[name] = NamedOptimizer(name, partial(make, LEARNING_RATE))
    others = {
        "prodigy": lambda: optim.prodigy(
            1.0, estim_lr0=LEARNING_RATE
        ),  # its own first estimate is 1e-6
        "sgd, momentum": lambda: optim.sgd(LEARNING_RATE, momentum=0.9),
        "clip + adamw": lambda: optim.chain(
            optim.clip_by_global_norm(0.1), optim.adamw(LEARNING_RATE)
        ),
        "clip + lamb": lambda: optim.chain(
            optim.clip_by_global_norm(0.1), optim.lamb(LEARNING_RATE)
        ),
    }
    return found | {name: NamedOptimizer(name, make) for name, make in others.items()}


def _takes_a_rate(make: Any) -> bool:
    parameters = inspect.signature(make).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty]
    return "learning_rate" in parameters and required in ([], ["learning_rate"])


def optimizers(names: Sequence[str] | None = None) -> st.SearchStrategy[NamedOptimizer]:
    """Optimizers with `name` and `make()`.

    Args:
        names: of `known_optimizers`. None: all but those in `AMPLIFYING`, which are for
            `allow_round_off=True`.
    """
    known = known_optimizers()
    return st.sampled_from(
        [known[name] for name in names or known if names or name not in AMPLIFYING]
    )
