"""Draw the life of a unit in a step, by level, as `fz.plan` tells it: `python -m docs.draw_life`.

Between two units of a few bytes, the planned memory of a step is that of the unit between them. It
writes `life.svg` beside this file. `tests/test_docs.py` compares the two.
"""

from __future__ import annotations

from pathlib import Path

import torch

import functorch_zero as fz
from docs.pictures import Picture
from functorch_zero import optim
from functorch_zero.params import Params, UnitSpec
from functorch_zero.planning import Plan, Sample
from functorch_zero.planning.report import KINDS
from functorch_zero.sharded.drawing import COLORS

RANKS = 4
SHAPES = {"before": (8,), "unit": (1000, 1000), "after": (8,)}
# The columns: a moment of the plan, and how it is called here
MOMENTS = {
    "forward of before": ("forward", "before"),
    "forward of unit": ("", "unit"),
    "backward": ("", "after"),  # the end of forward
    "backward of after": ("backward", "after"),
    "backward of unit": ("", "unit"),
    "backward of before": ("", "before"),
    "optimizer": ("update", ""),
    "next": ("between", "steps"),
}
COLUMN, HEIGHT = 49, 84  # pixels
SAID = {"all_gather": "gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}
# Where the collectives of the unit stand, in columns, by phase and kind
PLACES = {
    ("forward", "all_gather"): 0.5,
    ("backward", "all_gather"): 3.4,
    ("backward", "reduce_scatter"): 4.9,
    ("backward", "all_reduce"): 4.9,
    ("publish", "all_gather"): 6.5,
}


def plan(level: int) -> Plan:
    leaves = {
        f"{name}.w": torch.empty(shape, device="meta", requires_grad=True)
        for name, shape in SHAPES.items()
    }
    units = tuple(UnitSpec(name, (name,), (f"{name}.w",), ()) for name in SHAPES)
    return fz.plan(Params(leaves, units), optim.adamw(1e-3), level=level, ranks=RANKS)


def columns(samples: tuple[Sample, ...]) -> list[Sample]:
    """A sample per column: where a plan has none, memory is as before."""
    by_moment = {sample.moment: sample for sample in samples}
    between = samples[0]._replace(gradients=0, gathered=0, activations=0)
    made = [samples[0]]
    for moment in MOMENTS:
        # At levels without gathers a plan's whole backward has this name, and comes at its end
        is_other = moment == "backward" and "forward of unit" not in by_moment
        found = None if is_other else by_moment.get(moment)
        made.append(between if moment == "next" else found or made[-1])
    return made[1:]


def svg() -> str:
    """The picture: a panel per level, a column per moment, by what is in memory."""
    plans = [plan(level) for level in range(4)]
    scale = HEIGHT / max(made.peak.total for made in plans)
    made = Picture(f"The life of a unit in a step: AdamW, {RANKS} ranks")
    for i, (phase, unit) in enumerate(MOMENTS.values()):
        made.text(4 + i * COLUMN, 34, phase)
        made.text(4 + i * COLUMN, 48, unit)
    top = 56
    for level, planned in enumerate(plans):
        made.text(4, top + 14, f"level {level}", bold=True)
        samples = columns(planned.samples)
        for i, sample in enumerate(samples):
            y = float(top + HEIGHT)
            for kind, nbytes in sample.by_kind().items():
                y -= nbytes * scale
                made.rect(4 + i * COLUMN, y, COLUMN - 5, nbytes * scale, COLORS[kind])
        for call in planned.collectives:
            if call.unit == "unit":
                place = 4 + (PLACES[call.phase, call.kind] + 0.5) * COLUMN
                made.text(place, top + HEIGHT + 14, SAID[call.kind], at="middle")
        if samples[1].gathered > samples[2].gathered:
            made.text(4 + 2.5 * COLUMN, top + HEIGHT + 14, "free", at="middle")
        top += HEIGHT + 22
    made.memory_legend(top + 6, [*KINDS.values()])
    return made.svg()


if __name__ == "__main__":
    Path(__file__).with_name("life.svg").write_text(svg())
