"""What optimizers send in a step, counted: `python tests/benchmarks/traffic.py`. Seconds, no other
process, no data.

For a language model of GPT-2's size in float32 on 8 ranks, each rank in turn is imagined: it runs
an optimizer's update on the meta device, and its collectives are recorded. Beside it: gathering
everything, the other way to show an optimizer whole tensors, where every rank all-gathers the
gradients concerned and does all the work.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import optree
import torch

from functorch_zero import optim
from functorch_zero.groups import CountingGroup
from functorch_zero.groups.counting import Call
from functorch_zero.layout.build import make_layout
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.tree import named_leaves
from tests.conformance.gpt import gpt_tree


def for_matrices(optimizer: optim.Transform) -> optim.Transform:
    """That for the blocks' matrices, AdamW for the rest, embeddings included."""
    return optim.partition({"matrix": optimizer, "rest": optim.adamw(1e-3)}, label)


def label(path: str, leaf: torch.Tensor) -> str:
    return "matrix" if leaf.ndim == 2 and path.startswith("block") else "rest"


OPTIMIZERS: dict[str, Callable[[], optim.Transform]] = {
    "adamw": lambda: optim.adamw(1e-3),
    "clip_by_global_norm, adamw": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(1e-3)
    ),
    "adaptive_grad_clip, adamw": lambda: optim.chain(
        optim.adaptive_grad_clip(0.1), optim.adamw(1e-3)
    ),
    "lamb": lambda: optim.lamb(1e-3),
    "lars": lambda: optim.lars(1e-3),
    "novograd": lambda: optim.contrib.novograd(1e-3),
    "adafactor": lambda: optim.adafactor(),
    "sm3": lambda: optim.contrib.sm3(1e-3),
    "prodigy": lambda: optim.prodigy(),
    "lbfgs": lambda: optim.lbfgs(),
    "muon": lambda: for_matrices(optim.muon(1e-3)),
    "shampoo": lambda: for_matrices(optim.shampoo(1e-3)),
    "soap": lambda: for_matrices(optim.soap()),
}


class Model(NamedTuple):
    """A decoder."""

    vocab: int = 50304
    width: int = 768
    layers: int = 12
    length: int = 1024


def calls_of(optimizer: optim.Transform, model: Model, rank: int, ranks: int) -> list[Call]:
    """The collectives of one update."""
    params = gpt_tree(*model, device="meta")
    layout = make_layout(params, ranks, trainable=lambda path, leaf: True)
    group = CountingGroup(ranks, rank)
    across = Sharded(layout, group)
    pieces = optree.tree_map(lambda e: torch.empty(e.num_here, device="meta"), across.extents)
    state = optimizer.init(pieces, across)
    group.reset()
    optimizer.update(pieces, state, pieces, across)
    return group.calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args().ranks
    warnings.filterwarnings("ignore", category=UserWarning)
    params = gpt_tree(*Model(), device="meta")
    size = sum(leaf.nbytes for leaf in optree.tree_leaves(params))
    matrices = sum(
        leaf.nbytes for path, leaf in named_leaves(params).items() if label(path, leaf) == "matrix"
    )
    print(
        f"{nbytes(size)} of params, {nbytes(matrices)} of them in the blocks' matrices, on "
        f"{ranks} ranks.\n"
    )
    print("| optimizer | collectives | sent by a rank, mean | most | gathering | mean of that |")
    print("|---|---|---|---|---|---|")
    for name, make in OPTIMIZERS.items():
        optimizer = make()
        by_rank = [calls_of(optimizer, Model(), rank, ranks) for rank in range(ranks)]
        sent = [sum(call.sent_bytes for call in calls) for calls in by_rank]
        mean, concerned = (
            sum(sent) / ranks,
            matrices if optimizer.needs == optim.Needs.WHOLE_LEAF else size,
        )
        gathering = (
            0 if optimizer.needs == optim.Needs.POINTWISE else concerned * (ranks - 1) / ranks
        )
        share = f"{mean / gathering:.2%}" if gathering else "-"
        print(
            f"| {name} | {kinds(by_rank[0])} | {nbytes(mean)} | {nbytes(max(sent))} | "
            f"{nbytes(gathering)} | {share} |"
        )


def kinds(calls: list[Call]) -> str:
    """Which, and how many of each."""
    names = dict.fromkeys(call.kind for call in calls)
    return (
        ", ".join(
            f"{sum(c.kind == name for c in calls)} {name.replace('_', '-')}" for name in names
        )
        or "none"
    )


def nbytes(size: float) -> str:
    """With its unit."""
    for unit in ("B", "KiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} MiB"


if __name__ == "__main__":
    main()
