"""Random numbers of a program, `fz.random`: the same whole and at every level and number of
ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..optim.random_numbers import Kind, Number, draw_leaf, key_of
from ..tree import map_with_paths
from .scope import next_key

__all__ = ["normal", "rademacher", "uniform"]


def normal(like: Any, *, seed: Number | None = None, step: Number = 0) -> Any:
    """Numbers of the standard normal distribution, in a tree like another one.

    The number of an element follows from the seed, the step, the leaf's path and the element's
    place in the whole leaf, and not from how the tree is cut. So ranks draw their own parts of the
    numbers that one process draws, and nothing is sent. They are drawn in float32, float64 or
    complex, and rounded to the leaf's dtype. Those of CPUs and GPUs differ, as torch's do.

    Args:
        like: a tree of floating-point tensors, sharded trees among them, held or in pieces. The
            result has its structure, shapes, dtypes and devices, and None where it has None.
        seed: None: the numbers follow from the seed and number of the running step, and from the
            number of the draw in it. Every rank makes the same draws. An integer: from it and
            `step` alone, anywhere.
        step: beside a seed.

    Raises:
        StructureError: there is no seed: no program's step runs, or a loss does.

    >>> import torch
    >>> normal({"w": torch.zeros(3)}, seed=0)
    {'w': tensor([ 0.8591, -1.0380, -1.9417])}
    """
    return _draw("normal", like, seed, step)


def uniform(like: Any, *, seed: Number | None = None, step: Number = 0) -> Any:
    """As `normal`, uniform in [0, 1). Rounding doesn't reach 1."""
    return _draw("uniform", like, seed, step)


def rademacher(like: Any, *, seed: Number | None = None, step: Number = 0) -> Any:
    """As `normal`, -1 or 1, each half of the time."""
    return _draw("rademacher", like, seed, step)


def _draw(kind: Kind, like: Any, seed: Number | None, step: Number) -> Any:
    key = next_key() if seed is None else key_of(seed, step)
    return map_with_paths(partial(_draw_leaf, kind, key), like)


def _draw_leaf(kind: Kind, key: int, path: str, like: Any) -> Any:
    """A leaf like this one; of a piece, the part of the whole leaf's numbers."""
    extent = getattr(like, "extent", None)  # of a leaf of a sharded tree
    if extent is None:
        return draw_leaf(kind, key, path, like, None)
    drawn = draw_leaf(kind, key, path, like.here, extent)
    return like.filled_with(drawn, f"{kind} numbers of {path!r} by {key}")
