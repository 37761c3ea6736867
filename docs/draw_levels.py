"""Draw a rank's memory by level, as `fz.plan` tells it: `python -m docs.draw_levels`.

It writes `levels.svg` beside this file. `tests/test_docs.py` compares the two.
"""

from __future__ import annotations

from pathlib import Path

import torch

import functorch_zero as fz
from docs.pictures import Picture
from examples.plan_decoder import Shape, params_of
from functorch_zero import optim
from functorch_zero.planning.report import KINDS, Sample, bytes_text
from functorch_zero.sharded.drawing import COLORS

RANKS = 8
MODEL = Shape(layers=24, width=2048, vocab=32000)
LEFT, LONGEST, ROW = 52, 286, 26  # pixels


def peaks() -> tuple[int, list[Sample]]:
    """The number of params; by level, the moment of a step with most memory."""
    params, adamw = params_of(MODEL, torch.float32, None), optim.adamw(1e-3)
    plans = [fz.plan(params, adamw, level=level, ranks=RANKS) for level in range(4)]
    return plans[0].num_params, [plan.peak for plan in plans]


def svg() -> str:
    """The picture: a bar per level, by what is in memory."""
    num_params, samples = peaks()
    scale = LONGEST / max(sample.total for sample in samples)
    made = Picture(f"A rank's memory: {num_params / 1e9:.1f} billion params, AdamW, {RANKS} ranks")
    for level, sample in enumerate(samples):
        x, y = float(LEFT), 24 + level * ROW
        made.text(4, y + 14, f"level {level}")
        for kind, nbytes in sample.by_kind().items():
            made.rect(x, y, nbytes * scale, 18, COLORS[kind])
            x += nbytes * scale
        made.text(x + 6, y + 14, bytes_text(sample.total))
    made.memory_legend(30 + len(samples) * ROW, [*KINDS.values()])
    return made.svg()


if __name__ == "__main__":
    Path(__file__).with_name("levels.svg").write_text(svg())
