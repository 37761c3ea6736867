"""Draw the gallery's pictures from runs of the examples: `python -m docs.draw_gallery [clip ...]`.

It writes `gallery/NAME.svg` beside this file; without names, of all examples. That takes about ten
minutes on two cores. `ray_train` needs Ray, which isn't among the project's packages.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import NamedTuple

import torch

import functorch_zero as fz
from docs.pictures import BLUE, GRAY, GREEN, ORANGE, WIDTH, Picture
from functorch_zero import checkpoint, optim, testing
from functorch_zero.planning.report import bytes_text
from functorch_zero.sharded.drawing import COLORS

EXAMPLES = Path(__file__).parents[1] / "examples"
OUT = Path(__file__).with_name("gallery")
LEFT, TOP, HEIGHT = 52, 28, 130  # pixels, of a chart


class Line(NamedTuple):
    """A series of a chart."""

    color: str
    points: Sequence[tuple[float, float]]
    dotted: bool = False  # as dots, so that a line below them is seen


def chart(made: Picture, lines: dict[str, Line], *, x: str, y: str, log: bool = False) -> None:
    """Lines over common axes, whose ends are written beside them."""
    xs = [point[0] for line in lines.values() for point in line.points]
    ys = [point[1] for line in lines.values() for point in line.points]
    scale = math.log if log else float
    low, high = scale(min(ys)), scale(max(ys))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - min(xs)) / (max(xs) - min(xs))
        up = (scale(point[1]) - low) / (high - low)
        return LEFT + 8 + across * (WIDTH - LEFT - 20), TOP + 6 + (1 - up) * (HEIGHT - 12)

    bottom = TOP + HEIGHT
    made.line([(LEFT, TOP), (LEFT, bottom), (WIDTH - 6, bottom)], GRAY)
    made.text(LEFT - 4, TOP + 12, f"{max(ys):.2g}", at="end")
    made.text(LEFT - 4, bottom - 2, f"{min(ys):.2g}", at="end")
    made.text(LEFT + 4, bottom + 15, f"{min(xs):g}")
    made.text(WIDTH - 8, bottom + 15, f"{max(xs):g}", at="end")
    made.text((LEFT + WIDTH) / 2, bottom + 15, f"{y} by {x}", at="middle")
    for line in lines.values():
        draw = made.dots if line.dotted else made.line
        draw(map(at, line.points), line.color)
    made.legend(bottom + 24, {name: line.color for name, line in lines.items()}, left=LEFT)


def bars(made: Picture, rows: dict[str, tuple[dict[str, float], str]], *, left: float) -> None:
    """A bar per row, by kind of memory, with a text behind it."""
    longest = max(sum(parts.values()) for parts, _ in rows.values())
    for i, (label, (parts, text)) in enumerate(rows.items()):
        x, y = left, TOP + i * 24.0
        made.text(4, y + 13, label)
        for kind, size in parts.items():
            width = size / longest * (WIDTH - left - 7 * max(len(t) for _, t in rows.values()) - 12)
            made.rect(x, y, width, 17, COLORS[kind])
            x += width
        made.text(x + 6, y + 13, text)
    kinds = dict.fromkeys(kind for parts, _ in rows.values() for kind in parts)
    made.memory_legend(TOP + len(rows) * 24 + 6, [*kinds])


def module_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(**run_path(str(EXAMPLES / f"{name}.py")))


def printed(name: str, *options: str, launcher: Sequence[str] = ()) -> str:
    """What an example prints."""
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return ended.stdout


def of_steps(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(number + 1, value) for number, value in enumerate(values)]


def clip() -> Picture:
    example = module_of("clip")

    def losses(ranks: int, level: int) -> list[tuple[float, float]]:
        return of_steps(testing.run_ranks(lambda g: example.train(g, 60, level, 1), ranks)[0])

    made = Picture("Contrastive loss over the whole batch")
    lines = {
        "1 rank": Line(BLUE, losses(1, 0)),
        "3 ranks, level 3": Line(ORANGE, losses(3, 3), dotted=True),
    }
    chart(made, lines, x="step", y="loss")
    return made


def custom_transform() -> Picture:
    """How long an update is that should have the length of its param, 1."""
    example = module_of("custom_transform")
    counts = range(1, 9)
    torch.manual_seed(0)
    whole = torch.randn(4096, dtype=torch.float64)
    whole = (whole / whole.norm()).requires_grad_()

    def of_pieces(num_ranks: int) -> float:
        pieces = whole.detach().tensor_split(num_ranks)
        made = [example.scale_by_own_norm().update([piece], (), [piece])[0] for piece in pieces]
        return torch.cat([piece for (piece,) in made]).norm().item()

    def sharded(group: fz.Group) -> float:
        optimizer = optim.chain(example.scale_by_trust_ratio(), optim.scale(-1.0))
        step = fz.train_step(lambda p, b, x: (p["w"].square() * x).sum(), optimizer)
        step = fz.shard(step, level=3, group=group)
        state = step.init({"w": whole}, {})
        state, _ = step(state, torch.ones(1, dtype=torch.float64))
        return (step.unshard(state).params["w"] - whole).norm().item()

    right = [(n, testing.run_ranks(sharded, n)[0]) for n in counts]
    made = Picture("The length of an update that should be 1")
    lines = {
        "norms of pieces": Line(ORANGE, [(n, of_pieces(n)) for n in counts]),
        "across.norm": Line(BLUE, right),
    }
    chart(made, lines, x="ranks", y="length")
    return made


def digits() -> Picture:
    rows = {}
    for line in printed("digits").splitlines():
        if match := re.match(r"(level \d) +([\d.]+%) +(\d+) +(\d+) +(\d+)", line):
            held = dict(
                zip(("params", "gradients", "optimizer state"), match.groups()[2:], strict=True)
            )
            parts = {kind: float(number) for kind, number in held.items()}
            rows[match[1]] = (parts, f"{sum(parts.values()):.0f} kB, {match[2]} right")
    made = Picture("A ConvNet on 2 ranks: memory and accuracy")
    bars(made, rows, left=52)
    return made


def finetune() -> Picture:
    """The held-out losses before, between and after its two trainings."""
    lines = {}
    for name, color, dotted, ranks, level in (
        ("1 rank", BLUE, False, "1", "0"),
        ("2 ranks, level 3", ORANGE, True, "2", "3"),
    ):
        out = printed("finetune", "--ranks", ranks, "--level", level, "--steps", "60")
        first, pretrained, _, tuned = map(float, re.findall(r"\d\.\d{6}", out))
        lines[name] = Line(color, [(0, first), (60, pretrained), (120, tuned)], dotted)
    made = Picture("A Llama pretrained, then tuned on docstrings")
    chart(made, lines, x="step", y="held-out loss")
    return made


def gan() -> Picture:
    """What the generator makes of noise, before and after; it was trained on 2 ranks."""
    example = module_of("gan")
    with tempfile.TemporaryDirectory() as root:
        printed("gan", "--ranks", "2", "--steps", "300", "--root", root)
        step = fz.shard(
            fz.program_step(example.program, init=example.init),
            level=0,
            group=fz.groups.SingleRank(),
        )
        state = step.init(example.first_gen, example.first_disc)
        trained, _ = checkpoint.load(root, step, like=state)
        after = step.unshard(trained).value.gen
    noise = torch.randn(160, example.NOISE, generator=torch.Generator().manual_seed(0)).double()
    made = Picture("A GAN on eight Gaussians, 2 ranks")
    panels = {"before": example.first_gen, "after 300 steps of 2 ranks": after}
    for i, (name, params) in enumerate(panels.items()):
        middle = 100 + 200 * i
        made.text(middle, 200, name, at="middle")
        for x, y in example.MODES.tolist():
            made.rect(middle + 65 * x - 4, 105 - 65 * y - 4, 8, 8, GREEN)
        with torch.no_grad():
            points = example.generate(params, {}, noise)[0].clamp(-1.4, 1.4)
        made.dots(((middle + 65 * x, 105 - 65 * y) for x, y in points.tolist()), ORANGE)
    return made


def lora() -> Picture:
    rows = {}
    for line in printed("lora").splitlines():
        if match := re.match(r"(.+?) +[\d.]+% -> ([\d.]+%) +(\d+) +(\d+)", line):
            parts = {"params": float(match[3]), "optimizer state": float(match[4])}
            rows[match[1]] = (parts, f"{sum(parts.values()):.0f} kB, {match[2]}")
    made = Picture("Turned digits, 2 ranks: memory of a rank, accuracy")
    bars(made, rows, left=158)
    return made


def pinn() -> Picture:
    example, steps = module_of("pinn"), (25, 50, 100, 200, 400)

    def errors(ranks: int, level: int) -> list[tuple[float, float]]:
        made = []
        for num_steps in steps:
            run = lambda group, n=num_steps: example.train(group, n, level)  # noqa: E731
            made.append((num_steps, testing.run_ranks(run, ranks)[0][1]))
        return made

    made = Picture("Largest error of the equation's solution")
    lines = {
        "1 rank": Line(BLUE, errors(1, 0)),
        "4 ranks, level 3": Line(ORANGE, errors(4, 3), dotted=True),
    }
    chart(made, lines, x="steps", y="error", log=True)
    return made


def plan_decoder() -> Picture:
    example, rows = module_of("plan_decoder"), {}
    shape = example.Shape(layers=32, width=4096, vocab=32000, hidden=11008, gated=True)
    params = example.params_of(shape, torch.bfloat16, None)
    for level in range(4):
        plan = fz.plan(params, optim.adamw(1e-3), level=level, ranks=64, bandwidth=50e9)
        held = {kind: float(nbytes) for kind, nbytes in plan.peak.by_kind().items()}
        rows[f"level {level}"] = (held, f"{bytes_text(plan.peak.total)}, {plan.seconds():.2f} s")
    made = Picture("6.7 billion params on 64 ranks: peak, and time to send")
    bars(made, rows, left=52)
    return made


def property_test() -> Picture:
    """The cases that Hypothesis draws, all of which hold."""
    from hypothesis import settings  # here: Ray's own environment may lack it

    example, seen = module_of("property_test"), []

    def check(sizes: list[int], ranks: int, level: int, seed: int) -> None:
        example.check_case(sizes, ranks, level, seed)
        seen.append((ranks, level))

    settings(max_examples=60, deadline=None, derandomize=True, database=None)(
        example.cases(check)
    )()
    made = Picture(f"{len(seen)} drawn cases: sharded and unsharded are equal")
    for level in range(4):
        made.text(4, 44 + 34 * level, f"level {level}")
        for ranks in range(1, 6):
            for i in range(seen.count((ranks, level))):
                x, y = 62 + 68 * (ranks - 1) + 10 * (i % 6), 32 + 34 * level + 10 * (i // 6)
                made.rect(x, y, 8, 8, BLUE)
    for ranks in range(1, 6):
        made.text(62 + 68 * (ranks - 1), 178, "1 rank" if ranks == 1 else f"{ranks} ranks")
    return made


def ray_train() -> Picture:
    example = module_of("ray_train")
    whole, lost = example.run(30, None), example.run(30, 17)
    made = Picture("Ray: one of four machines is lost in step 17")
    lines = {
        "4 workers": Line(BLUE, of_steps(whole["losses"])),
        f"4, then {lost['workers']}": Line(ORANGE, of_steps(lost["losses"]), dotted=True),
    }
    chart(made, lines, x="step", y="loss")
    return made


def recommender() -> Picture:
    example = module_of("recommender")
    size = example.Size(num_rows=100_000, num_groups=64, num_ratings=1024, num_steps=40)

    def recalls(ranks: int, level: int) -> tuple[list[tuple[float, float]], float]:
        torch.manual_seed(0)
        towers = example.TwoTowers(size.num_rows).double()
        apply, params, buffers = fz.functionalize(towers, units=example.Tower)
        step = example.make_step(apply, optim.rows.adagrad_by_row(0.3))
        seen, held = testing.run_ranks(
            lambda group: example.train(group, step, params, buffers, size, level), ranks
        )[0]
        return of_steps([recall for _, recall in seen]), held

    (one, _), (three, held) = recalls(1, 0), recalls(3, 3)
    made = Picture("Recall@10 of two towers on tables of rows")
    lines = {
        "1 rank": Line(BLUE, one),
        f"3 ranks, {held:.2f} of the tables each": Line(ORANGE, three, dotted=True),
    }
    chart(made, lines, x="step", y="recall")
    return made


def resume() -> Picture:
    """Attempts of two runs, one of which loses a rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "3"]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    made, y = Picture("Rank 1 is killed in step 25; the bits are the same"), 28
    for title, fault in {"undisturbed": [], "killed": ["--fault", "kill", "--at", "25"]}.items():
        with tempfile.TemporaryDirectory() as root:
            out = printed("resume", "--root", root, *fault, launcher=torchrun)
        starts = [int(step) for step in re.findall(r"from step (\d+)", out)]
        found = re.search(r"digest (\w+)", out)
        assert found is not None and len(starts) == 1 + bool(fault)
        made.text(4, y + 13, title)
        for attempt, start in enumerate(starts):
            end, color = (40, BLUE) if attempt == len(starts) - 1 else (25, ORANGE)
            made.rect(84 + 7.6 * start, y, 7.6 * (end - start), 17, color)
            y += 22
        made.text(84, y + 10, f"digest of the final state {found[1]}")
        y += 30
    made.legend(y, {"to the end, step 40": BLUE, "killed": ORANGE}, left=84)
    return made


def train_lm() -> Picture:
    rows = {}
    for level in range(4):
        out = printed("train_lm", "--size", "tiny", "--steps", "60", "--level", str(level))
        held = re.search(r"rank 0 holds ([\d.]+)\+([\d.]+)\+([\d.]+)", out)
        loss = re.search(r"held-out loss .* -> ([\d.]+)", out)
        assert held is not None and loss is not None
        kinds = ("params", "gradients", "optimizer state")
        parts = dict(zip(kinds, map(float, held.groups()), strict=True))
        rows[f"level {level}"] = (parts, f"{sum(parts.values()):.1f} MB, loss {loss[1]}")
    made = Picture("A byte-level GPT on 2 ranks: memory and loss")
    bars(made, rows, left=52)
    return made


PICTURES: dict[str, Callable[[], Picture]] = {
    made.__name__: made
    for made in (
        clip,
        custom_transform,
        digits,
        finetune,
        gan,
        lora,
        pinn,
        plan_decoder,
        property_test,
        ray_train,
        recommender,
        resume,
        train_lm,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[*PICTURES], metavar="NAME")
    for name in parser.parse_args().names:
        (OUT / f"{name}.svg").write_text(PICTURES[name]().svg())
        print(f"{name}.svg", flush=True)


if __name__ == "__main__":
    main()
