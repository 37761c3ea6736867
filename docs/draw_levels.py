"""Draw a rank's memory by level, as `fz.plan` tells it: `python -m docs.draw_levels`.

It writes `levels.svg` beside this file. `tests/test_docs.py` compares the two.
"""

from __future__ import annotations

from pathlib import Path

import torch

import functorch_zero as fz
from examples.plan_decoder import Shape, params_of
from functorch_zero import optim
from functorch_zero.planning.report import KINDS, Sample, bytes_text

DRAWN = {**KINDS, "activations": "temporaries"}  # without a batch there are no activations
RANKS = 8
MODEL = Shape(layers=24, width=2048, vocab=32000)
HEIGHT, LEFT, WIDTH, ROW = 176, 64, 560, 30  # pixels
COLORS = {
    "params": "#1769aa",
    "state": "#e08a1e",
    "gradients": "#5a9e4b",
    "gathered": "#b0b0b0",
    "activations": "#8d6bb0",
}
STYLE = """text { font: 12px sans-serif; fill: #333 } .title { font-weight: bold }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }"""


def peaks() -> tuple[int, list[Sample]]:
    """The number of params; by level, the moment of a step with most memory."""
    params, adamw = params_of(MODEL, torch.float32, None), optim.adamw(1e-3)
    plans = [fz.plan(params, adamw, level=level, ranks=RANKS) for level in range(4)]
    return plans[0].num_params, [plan.peak for plan in plans]


def svg() -> str:
    """The picture: a bar per level, by what is in memory."""
    num_params, samples = peaks()
    scale = WIDTH / max(sample.total for sample in samples)
    title = f"A rank's memory: {num_params / 1e9:.1f} billion params, AdamW, {RANKS} ranks"
    body = [f'<text class="title" x="4" y="16">{title}</text>']
    for level, sample in enumerate(samples):
        x, y = float(LEFT), 28 + level * ROW
        body.append(f'<text x="4" y="{y + 15}">level {level}</text>')
        for kind in DRAWN:
            width = getattr(sample, kind) * scale
            body.append(
                f'<rect fill="{COLORS[kind]}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="20"/>'
            )
            x += width
        body.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{bytes_text(sample.total)}</text>')
    x, y = LEFT, 28 + len(samples) * ROW
    for kind, name in DRAWN.items():
        body.append(f'<rect fill="{COLORS[kind]}" x="{x}" y="{y + 6}" width="12" height="12"/>')
        body.append(f'<text x="{x + 18}" y="{y + 16}">{name}</text>')
        x += 36 + 7 * len(name)
    size = f'width="{LEFT + WIDTH + 76}" height="{HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{title}</title>",
    ]
    return "\n".join([*lines, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("levels.svg").write_text(svg())
