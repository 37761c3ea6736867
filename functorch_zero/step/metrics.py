"""What a step says of its own update: norms, and what the optimizer's state reports. Asked for by
name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..optim.across import Across, sum_dtype, total_of
from ..optim.states import state_metrics
from ..tree import PyTree

NORMS = ("grad_norm", "update_norm", "param_norm")


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple, each once."""
    if isinstance(names, str):
        raise TypeError(f"metrics must be a list of names, got the string {names!r}")
    found = tuple(names)
    if len(set(found)) != len(found):
        raise ValueError(f"metrics has a name twice: {found}")
    return found


def check_reported(names: Sequence[str], opt_state: Any) -> None:
    """Raise if a metric that was asked for is nothing that a step with this optimizer's state
    knows."""
    known = [*NORMS, *_by_name(state_metrics(opt_state))]
    for name in names:
        if name not in known:
            raise ValueError(
                f"this optimizer has no metric {name!r}. Remedy: choose among {', '.join(known)}"
            )


class UpdateMetrics:
    """The metrics of one update. Norms are taken of what this rank holds, and summed in the end
    with one collective."""

    def __init__(self, names: Sequence[str], across: Across):
        self._names, self._across = names, across
        self._squares: dict[str, PyTree[Tensor]] = {}

    def see(self, name: str, tree: Callable[[], PyTree[Tensor]]) -> None:
        """Take the norm of a tree of whole leaves or pieces if it was asked for."""
        if name in self._names:
            self._squares[name] = tree_map(_square, tree())

    def metrics(self, opt_state: Any) -> dict[str, Tensor]:
        """All that was asked for, by name."""
        reported = state_metrics(opt_state) if set(self._names) - set(NORMS) else {}
        norms: dict[str, Tensor] = {}
        if self._squares:
            sums = self._across.sum(*self._squares.values())
            for name, tree in zip(
                self._squares, sums if len(self._squares) > 1 else (sums,), strict=True
            ):
                norms[name] = total_of(optree.tree_leaves(tree)).sqrt()
        found = norms | reported
        wanted = [
            key
            for name in self._names
            for key in found
            if key == name or key.startswith(name + ".")
        ]
        return {key: found[key] for key in wanted}


def _square(x: Tensor) -> Tensor:
    """The sum of its elements' squares, 0-d."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=sum_dtype(x.dtype))
    return norm.square()


def _by_name(metrics: Iterable[str]) -> list[str]:
    """The names without the paths that tell several of one name apart."""
    return list(dict.fromkeys(key.split(".")[0] for key in metrics))
