"""Pictures of plans. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from .records import KINDS, Sample


def draw(samples: Sequence[Sample], path: str, *, title: str) -> None:
    """A step's memory over its moments, stacked by kind."""
    figure_of_step(samples, title=title).savefig(path)


def draw_levels(plans: Mapping[str, Sample], path: str, *, title: str) -> None:
    """The peaks of several plans side by side, by label ("level 3, 64 ranks", say), stacked by kind."""
    figure_of_levels(plans, title=title).savefig(path)


def figure_of_step(samples: Sequence[Sample], *, title: str) -> Any:
    """The figure of `draw`: one area a kind, one place a sample, in MB."""
    figure, axes = _figure(title)
    stacks = [[getattr(s, field) / 1e6 for s in samples] for field in KINDS]
    axes.stackplot(range(len(samples)), stacks, labels=KINDS.values(), step="mid")
    shown = range(0, len(samples), max(1, len(samples) // 24))
    axes.set_xticks(list(shown), [samples[i].moment for i in shown], rotation=90, fontsize=6)
    axes.set_ylabel("MB of a rank")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def figure_of_levels(plans: Mapping[str, Sample], *, title: str) -> Any:
    """The figure of `draw_levels`: a bar a plan, in GB."""
    figure, axes = _figure(title)
    bottom = [0.0] * len(plans)
    for field, kind in KINDS.items():
        heights = [getattr(peak, field) / 1e9 for peak in plans.values()]
        axes.bar(list(plans), heights, bottom=bottom, label=kind)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.tick_params(axis="x", rotation=90)
    axes.set_ylabel("GB of a rank")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _figure(title: str) -> tuple[Any, Any]:
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    except ImportError as error:
        raise ImportError("pictures need matplotlib. Remedy: pip install 'functorch-zero[plot]'") from error
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes
