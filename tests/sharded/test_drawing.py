"""What a notebook shows of plans and descriptions: HTML whose numbers are the object's."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import functorch_zero as fz
from functorch_zero import optim, planning, testing
from functorch_zero.planning.report import bytes_text
from functorch_zero.sharded.drawing import Bar, table_html


def read(html: str) -> tuple[str, list[list[str]], list[dict[str, int]], str]:
    """The title, the cells and the bytes by kind of each row, and the text that unfolds."""
    root = ElementTree.fromstring(html)
    cells, parts = [], []
    for row in root.findall(".//tbody/tr"):
        cells.append([cell.text or "" for cell in row.findall("td")[:-1]])
        titles = [span.attrib["title"] for span in row.iter("span")]
        found = [re.fullmatch(r"(.+): ([\d,]+) bytes", title) for title in titles]
        parts.append({match[1]: int(match[2].replace(",", "")) for match in found if match})
        assert len(parts[-1]) == len(titles)
    return root.findtext(".//b") or "", cells, parts, root.findtext(".//pre") or ""


def widths(html: str) -> list[float]:
    """Of each row's bar, in percent."""
    rows = ElementTree.fromstring(html).findall(".//tbody/tr")
    return [
        sum(
            float(w)
            for w in re.findall(r"width: ([\d.]+)%\"", ElementTree.tostring(bar, "unicode"))
        )
        for bar in (row.findall("td")[-1].find("div") for row in rows)
        if bar is not None
    ]


def plans() -> dict[str, planning.Plan]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(4)))
    return {f"level {n}": fz.plan(model, optim.adamw(1e-3), level=n, ranks=4) for n in range(4)}


def test_a_plan_shows_its_peak() -> None:
    plan = plans()["level 3"]
    peak = plan.peak
    title, cells, parts, text = read(plan._repr_html_())
    assert text == str(plan)
    assert title == f"level 3, 4 ranks: the peak of rank 0, at {peak.moment}"
    assert parts[-1] == peak.by_kind() and sum(parts[-1].values()) == peak.total
    assert cells[-1] == ["peak", bytes_text(peak.total)]
    for (kind, nbytes), own in zip(cells[:-1], parts, strict=False):
        assert own == {kind: peak.by_kind()[kind]} and nbytes == bytes_text(own[kind])
    *of_kinds, whole = widths(plan._repr_html_())
    assert whole == pytest.approx(100, abs=0.1) and sum(of_kinds) == pytest.approx(whole, abs=0.1)


def test_a_comparison_shows_peaks_to_one_scale() -> None:
    compared = planning.Comparison(plans())
    _, cells, parts, text = read(compared._repr_html_())
    assert text == str(compared)
    peaks = [plan.peak for plan in compared.plans.values()]
    assert parts == [peak.by_kind() for peak in peaks]
    assert cells == [[f"level {n}", bytes_text(peak.total)] for n, peak in enumerate(peaks)]
    most = max(peak.total for peak in peaks)
    assert widths(compared._repr_html_()) == pytest.approx(
        [100 * peak.total / most for peak in peaks], abs=0.1
    )


def test_a_description_shows_its_rows() -> None:
    apply, params, buffers = fz.functionalize(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))

    def run(group: Any) -> tuple[str, fz.State]:
        loss_fn = lambda p, b, x: apply(p, b, x)[0].square().mean()
        step = fz.shard(fz.train_step(loss_fn, optim.adamw(1e-3)), level=3, group=group)
        described = fz.describe(step, step.init(params, buffers))
        title, cells, parts, text = read(described._repr_html_())
        assert text == str(described)
        assert title == f"rank {group.rank} of 2 holds {described.nbytes:,} bytes"
        assert sum(sum(part.values()) for part in parts) == described.nbytes
        for row, (unit, where, held, *_), part in zip(described.rows, cells, parts, strict=True):
            kind = "params" if row.leaves else "other tensors"
            assert (unit, where, held) == (row.unit, row.where, f"{row.nbytes:,}")
            assert part == {kind: row.nbytes, "optimizer state": row.state_nbytes}
        return described._repr_html_()

    first, second = testing.run_ranks(run, 2)
    assert first == second.replace("rank 1 of", "rank 0 of")  # equal pieces are drawn equally


def test_texts_are_escaped() -> None:
    wild = "<script>alert('&')</script>"
    html = table_html(wild, (wild,), [Bar((wild,), {"params": 1})], text=wild)
    title, cells, parts, text = read(html)
    assert (title, cells, parts, text) == (wild, [[wild]], [{"params": 1}], wild)
    assert "<script" not in html


@pytest.mark.parametrize("bars", [[], [Bar(("nothing",), {"params": 0})]])
def test_nothing_is_drawn_as_nothing(bars: list[Bar]) -> None:
    assert sum(widths(table_html("", ("",), bars, text=""))) == 0
