"""A user's own pointwise chain beside torch's fused AdamW: `python tests/benchmarks/update.py`.
Under a minute.

AdamW's operators written out as a chain, which `optim.compiled` makes one kernel, against torch's
fused AdamW on as many parameters, in one process of one thread, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from optree import tree_leaves
from torch import Tensor

from functorch_zero import optim
from functorch_zero.groups.single import SingleRank
from functorch_zero.layout.build import make_layout
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.testing.slicing import slice_tree

NUM_LEAVES = 8


def own_adamw(lr: float) -> optim.Transform:
    """A chain that nothing here has a kernel for: it is not known to be AdamW."""
    return optim.chain(
        optim.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8),
        optim.add_decayed_weights(0.01),
        optim.scale_by_learning_rate(lr),
    )


class Own:
    """The update of a step at level 0, and nothing else of it."""

    def __init__(self, transform: optim.Transform, params: dict[str, Tensor]):
        self._layout = make_layout(params, 1, trainable=lambda path, leaf: True)
        self._across = Sharded(self._layout, SingleRank())
        self._across.current.begin(donate=True)
        self._transform, self._params = transform, slice_tree(params, self._layout, 0)
        self._state = transform.init(self._params, self._across)

    def grads(self, grads: dict[str, Tensor]) -> Any:
        return slice_tree(grads, self._layout, 0)

    def step(self, grads: Any) -> None:
        updates, self._state = self._transform.update_and_add(
            grads, self._state, self._params, self._across
        )
        # None where a kernel has added them
        if updates is not None:
            for p, u in zip(tree_leaves(self._params), tree_leaves(updates), strict=True):
                p.add_(u)


class Torch:
    """torch.optim.AdamW, fused."""

    def __init__(self, params: dict[str, Tensor]):
        self._params = list(params.values())
        self._optimizer = torch.optim.AdamW(self._params, lr=1e-3, weight_decay=0.01, fused=True)

    def grads(self, grads: dict[str, Tensor]) -> Any:
        return grads

    def step(self, grads: Any) -> None:
        for p, g in zip(self._params, grads.values(), strict=True):
            p.grad = g
        self._optimizer.step()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def params() -> dict[str, Tensor]:
        return {f"leaf{i}": torch.ones(args.numel // NUM_LEAVES) for i in range(NUM_LEAVES)}

    contenders: dict[str, Any] = {
        "torch's fused AdamW": Torch(params()),
        "own chain, compiled": Own(optim.compiled(own_adamw(1e-3)), params()),
        "own chain, operators": Own(own_adamw(1e-3), params()),
        "optim.adamw": Own(optim.adamw(1e-3, weight_decay=0.01), params()),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for k in range(args.rounds + 2):
        for name, contender in contenders.items():
            grads = contender.grads(params())
            start = time.perf_counter()
            contender.step(grads)
            if k >= 2:
                times[name].append(time.perf_counter() - start)
    first = next(iter(times.values()))
    print(
        f"\n{args.numel / 1e6:.0f} million parameters, float32, one thread; medians of "
        f"{args.rounds} rounds.\n"
    )
    print("| update | ms | ratio | of the fastest |\n|---|---|---|---|")
    for name, seen in times.items():
        ratio = statistics.median(a / b for a, b in zip(seen, first, strict=True))
        print(
            f"| {name} | {statistics.median(seen) * 1e3:.1f} | {ratio:.2f} | "
            f"{min(seen) / min(first):.2f} |"
        )


if __name__ == "__main__":
    main()
