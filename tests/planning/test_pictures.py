"""The pictures of plans, and bytes for people."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from functorch_zero import optim, plan
from functorch_zero.planning import Plan
from functorch_zero.planning.report import (
    KINDS,
    bytes_text,
    figure_of_step,
)

PARAMS = {name: torch.empty(50, 16, device="meta", requires_grad=True) for name in "abc"}


def test_bytes_for_people() -> None:
    assert [bytes_text(n) for n in (0, 999, 1500, 2_500_000, 31.4e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "31.4 GB",
        "2.0 TB",
    ]


def a_plan() -> Plan:
    return plan(PARAMS, optim.adamw(1e-3), level=3, ranks=4)


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = tmp_path / "step.png"
    a_plan().draw(str(step))
    assert step.read_bytes()[:4] == b"\x89PNG"


def test_a_step_is_drawn_stacked_by_kind() -> None:
    """At each moment, a kind's area reaches from the sum of the kinds below it as far as it has
    bytes."""
    pytest.importorskip("matplotlib")
    samples = a_plan().samples
    figure = figure_of_step(samples, title="a title")
    (axes,) = figure.axes
    assert axes.get_title() == "a title" and [
        t.get_text() for t in figure.legends[0].get_texts()
    ] == [*KINDS.values()]
    areas = [area.get_paths()[0] for area in axes.collections]
    for i, sample in enumerate(samples):
        x, heights = (
            min(i + 0.1, len(samples) - 1.1),
            [getattr(sample, field) / 1e6 for field in KINDS],
        )
        for area, height, top in zip(areas, heights, accumulate(heights), strict=True):
            within = [area.contains_point((x, top - part * height)) for part in (0.01, 0.99)]
            assert within == [height > 0] * 2
            assert not any(
                area.contains_point((x, y))
                for y in (top * 1.01 + 1e-6, (top - height) * 0.99 - 1e-6)
            )
    moments = dict(
        zip(axes.get_xticks(), (t.get_text() for t in axes.get_xticklabels()), strict=True)
    )
    assert moments and all(samples[int(i)].moment == text for i, text in moments.items())


def test_without_matplotlib_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"functorch-zero\[plot\]"):
        a_plan().draw("nowhere.png")
