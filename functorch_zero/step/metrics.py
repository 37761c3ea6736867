"""Metrics of a step's own update, asked for by name: norms, and those that the optimizer's state
reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..optim.states import state_metrics

NORMS = ("grad_norm", "update_norm", "param_norm")


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple, each once."""
    # A string is a sequence of its letters
    if isinstance(names, str):
        raise TypeError(f"metrics must be a list of names, got the string {names!r}")
    found = tuple(names)
    if len(set(found)) != len(found):
        raise ValueError(f"metrics has a name twice: {found}")
    return found


def check_reported(names: Sequence[str], opt_state: Any) -> None:
    """Raise unless a step with this optimizer's state has every metric that was asked for."""
    # Asked of the first state, at `init`: an unknown name is told at once
    known = [*NORMS, *_by_name(state_metrics(opt_state))]
    for name in names:
        if name not in known:
            raise ValueError(
                f"this optimizer has no metric {name!r}. Remedy: choose among {', '.join(known)}"
            )


def chosen(names: Sequence[str], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of metrics, those of these names, in their order."""
    wanted: dict[str, Tensor] = {}
    for name in names:
        # An optimizer may report one name from several parts
        for key, value in found.items():
            # Several of one name have the path of their part after it: "clip_norm.0"
            if key == name or key.startswith(name + "."):
                wanted[key] = value
    return wanted


def _by_name(metrics: Iterable[str]) -> list[str]:
    """The names without the paths that tell several of one name apart."""
    # A dict keeps order and drops doubles
    return list(dict.fromkeys(key.split(".")[0] for key in metrics))
