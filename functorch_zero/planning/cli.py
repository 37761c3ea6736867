"""`python -m functorch_zero plan --layers 32 --width 4096 --vocab 32000 --ranks 64 --memory 80
--bandwidth 50`."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from .. import optim
from ..layout.levels import OF_ANY_LEAF
from ..precision import Precision
from .api import plan
from .decoder import Shape, read_config
from .report import Plan, align, bytes_text, draw_levels, zero_bytes

_GB = 1e9  # bytes, as devices' memory and links are sold


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `plan`."""
    parser = commands.add_parser(
        "plan",
        help="which levels fit a device's memory, and what a step sends",
        description="What each level holds on a rank and sends in a step, and the smallest level "
        "that fits. No model is made and no rank started. Activations are not in it: give them "
        "with --activations, or measure them with functorch_zero.plan and a batch.",
    )
    parser.set_defaults(run=run)
    # An argument not given leaves no attribute, so that `Shape` supplies its own default
    model = parser.add_argument_group(
        "the model, a decoder without biases, by its counts or by a file",
        argument_default=argparse.SUPPRESS,
    )
    for name, text in (
        ("layers", "blocks"),
        ("width", "of the residual stream"),
        ("vocab", "tokens"),
    ):
        model.add_argument(f"--{name}", type=int, help=text)
    model.add_argument("--hidden", type=int, help="width of the feed-forward; by default 4 * width")
    model.add_argument("--heads", type=int, help="of attention; by default 1")
    model.add_argument("--kv-heads", type=int, help="by default as many as heads")
    model.add_argument("--gated", action="store_true", help="the feed-forward has three matrices")
    model.add_argument("--tied", action="store_true", help="the head is the embedding")
    model.add_argument(
        "--config", type=Path, default=None, help="a Hugging Face config.json instead"
    )
    run_ = parser.add_argument_group("the run")
    run_.add_argument(
        "--optimizer", default="adamw", help="a function of functorch_zero.optim (default: adamw)"
    )
    run_.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float64"],
        help="of the params",
    )
    run_.add_argument(
        "--compute",
        choices=["bfloat16", "float16"],
        help="of the params in use; by default as kept",
    )
    run_.add_argument(
        "--ranks", type=int, nargs="+", required=True, help="one or several numbers of them"
    )
    run_.add_argument("--memory", type=_positive, help="a device's, in GB (10**9 bytes)")
    run_.add_argument(
        "--bandwidth", type=_positive, help="of a rank's link, in GB per second, one way"
    )
    run_.add_argument("--activations", type=float, default=0.0, help="a rank's, in GB")
    run_.add_argument("--json", type=Path, help="write the plans there")
    run_.add_argument("--picture", type=Path, help="draw the peaks there (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print the plans of all levels, for each number of ranks. The exit code is 1 when for one of
    these no level fits `--memory`; without it, 0."""
    if not 0 <= args.activations < math.inf:
        raise ValueError(f"--activations must be at least 0, got {args.activations}")
    precision = Precision(compute=getattr(torch, args.compute)) if args.compute else None
    params = _shape(args).params(getattr(torch, args.dtype), precision)
    optimizer = _optimizer(args.optimizer)
    bandwidth = args.bandwidth * _GB if args.bandwidth else None
    plans: dict[int, list[Plan]] = {}  # by number of ranks: one per level
    for num_ranks in args.ranks:
        plans[num_ranks] = []  # in the order of OF_ANY_LEAF
        for level in OF_ANY_LEAF:
            made = plan(params, optimizer, level=level.number, ranks=num_ranks, bandwidth=bandwidth)
            plans[num_ranks].append(made)
    # All are printed, also after one that does not fit
    fits = [_show(num_ranks, of_levels, args) for num_ranks, of_levels in plans.items()]
    every = [made for of_levels in plans.values() for made in of_levels]
    if args.json:
        # Each plan is a JSON object already
        texts = ",\n".join(made.to_json() for made in every)
        args.json.write_text(f"[{texts}]\n")
    if args.picture:
        # The moments with most memory, by label; without `--activations`, which `_show` adds
        peaks = {f"level {made.level}, {made.num_ranks} ranks": made.peak for made in every}
        title = f"{args.optimizer}, {_dtypes(args)}, without activations"
        draw_levels(peaks, str(args.picture), title=title)
    return 0 if all(fits) else 1


def _show(num_ranks: int, plans: Sequence[Plan], args: argparse.Namespace) -> bool:
    """Print the plans for one number of ranks. Whether one of them fits, or nobody asked."""
    num_params = plans[0].num_params
    model = f"{num_params:,} params in {_dtypes(args)}"
    print(f"{model}, {args.optimizer}, {num_ranks} ranks; of rank 0:\n")
    # A plan without a batch has no activations
    peaks = [made.peak.total + args.activations * _GB for made in plans]
    print(table(plans, peaks, args.memory))
    # Bytes by the paper's formula, beside the measured ones
    paper = [zero_bytes(num_params, num_ranks, level=level.number) for level in OF_ANY_LEAF]
    print("\nThe ZeRO paper's mixed precision, 2 + 2 + 12 bytes per parameter:", end=" ")
    print(", ".join(map(bytes_text, paper)))
    if args.memory is None:
        return True
    # Levels hold less and less, so the first that fits is the smallest
    for level, peak in zip(OF_ANY_LEAF, peaks, strict=True):
        if peak <= args.memory * _GB:
            print(f"\nThe smallest level that fits: {level.number}")
            return True
    print(f"\nNo level fits: the least is {bytes_text(min(peaks))}")
    return False


def table(plans: Sequence[Plan], peaks: Sequence[float], memory: float | None) -> str:
    """One row per level, as text. "at least": the time that the transfers alone take, where the
    plans know a bandwidth.

    Args:
        plans: one per level, in the order of `OF_ANY_LEAF`.
        peaks: bytes of a rank, one per plan, activations included.
        memory: of a device, in GB. None: nobody asks whether a level fits.
    """
    head = ["level", "params", "gradients", "state", "gathered", "peak", "sent per step"]
    has_times = any(made.bandwidth for made in plans)
    if has_times:
        head.append("at least")
    if memory:
        head.append(f"fits {memory:g} GB")
    rows = [head]
    # Peaks are given apart from the plans: activations may be added by hand
    for of_level, peak, level in zip(plans, peaks, OF_ANY_LEAF, strict=True):
        held = (of_level.params, of_level.gradients, of_level.state, of_level.gathered)
        row = [f"{level.number} {level.name}"]
        row += map(bytes_text, (*held, peak, of_level.sent_bytes))
        if has_times:
            row.append(f"{of_level.seconds():.3g} s")
        if memory:
            row.append("yes" if peak <= memory * _GB else "no")
        rows.append(row)
    return align(rows)


def _positive(text: str) -> float:
    """An argument's number, which must be above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # fails the comparison below, as any number out of range does
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _dtypes(args: argparse.Namespace) -> str:
    return f"{args.dtype}, used as {args.compute}" if args.compute else str(args.dtype)


def _shape(args: argparse.Namespace) -> Shape:
    """The model's counts, from a file or from the arguments."""
    # Arguments that were not given are not there, so that the defaults are those of `Shape`
    names = [field.name for field in fields(Shape)]
    counts = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if args.config and counts:
        raise ValueError(
            f"--config has the model's counts: give no others beside it, got {', '.join(counts)}"
        )
    if args.config:
        return read_config(args.config)
    if not {"layers", "width", "vocab"} <= set(counts):
        raise ValueError(
            "the model's size is missing: pass --layers, --width and --vocab, or --config"
        )
    return Shape(**counts)


def _optimizer(name: str) -> optim.Transform:
    """An optimizer by its name, among those whose first argument is the learning rate. It does not
    matter here."""
    known: dict[str, Callable[[float], optim.Transform]]
    # Modules and constants are in there, too
    public = vars(optim) | vars(optim.contrib)
    public |= {f"rows.{name}": getattr(optim.rows, name) for name in optim.rows.__all__}
    known = {made: make for made, make in public.items() if _takes_a_learning_rate(make)}
    if name not in known:
        raise ValueError(f"--optimizer must be one of {', '.join(sorted(known))}; got {name!r}")
    return known[name](1e-3)


def _takes_a_learning_rate(make: Any) -> bool:
    # `scale_by_*` are parts of chains and no optimizers, though they may take a rate
    own = inspect.isfunction(make) and not make.__name__.startswith("scale_by")
    return own and next(iter(inspect.signature(make).parameters), "") == "learning_rate"
