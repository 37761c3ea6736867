"""The drawing of the peers benchmark: every contender with its numbers, ours apart from the
others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

PRINTED = """`python tests/benchmarks/peers.py`: 2 ranks

|  | step ms | step ÷ ddp | peak MB | sent MB |
| --- | ---: | ---: | ---: | ---: |
| **level 3**, without resharding | 40.0 | 0.80 (0.79-0.81) | 75.3 | 23.2 |
| DDP & more | 50.0 | 1.00 (1.00-1.00) | 114.9 | 16.9 |
| `fully_shard` | - | - | 80.2 | 33.9 |

| level / peer | step |
|---|---:|
| a | 1 |
"""


@pytest.fixture(scope="module")
def module() -> Any:
    path = Path(__file__).parent / "draw_peers.py"
    spec = importlib.util.spec_from_file_location("draw_peers", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_contender_is_drawn(module: Any) -> None:
    svg = ElementTree.fromstring(module.draw({"small": module.read(PRINTED)}))
    texts = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {
        "small",
        "level 3, without resharding",
        "DDP & more",
        "fully_shard",
        "114.9",
        "40",
        "75.3",
    } <= set(texts)
    bars = list(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert [bar.get("class") for bar in bars] == ["ours", "peer", "ours", "peer", "peer"]
    assert float(bars[0].get("width") or 0) == pytest.approx(
        0.8 * float(bars[1].get("width") or 0), abs=0.1
    )


def test_another_table_is_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="step ms, peak MB"):
        module.read("| a | b |\n|---|---|\n| 1 | 2 |\n")
