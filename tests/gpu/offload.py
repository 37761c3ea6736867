"""Stage "places": the optimizer's state and saved tensors in the host's memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups.single import SingleRank
from tests.gpu.report import CUDA, DEVICE, Report
from tests.modules import Unit
from tests.places import layer

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optim.adamw(1e-3),
    "clip, unfused": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.scale_by_adam(), optim.scale_by_learning_rate(1e-3)
    ),
    "muon": lambda: optim.muon(1e-3),
    "adafactor": lambda: optim.adafactor(1e-3),
}


class Peak(NamedTuple):
    """Bytes on the GPU in one step."""

    before: int  # when it begins
    most: int

    @property
    def growth(self) -> int:
        return self.most - self.before


def places(report: Report) -> None:
    width, num_units = (16, 4) if report.tiny else (2048, 12)
    model = nn.Sequential(*(layer(width) for _ in range(num_units)))
    apply, params, buffers = fz.functionalize(model.to(DEVICE), units=Unit)
    unit = 4 * width * (width + 1)  # bytes of one unit's params
    all_params = num_units * unit

    def run(x: Tensor, optimizer: Any, donate: bool, place: Any) -> tuple[Any, Peak]:
        """The params after some steps, on the CPU, and the bytes in the last one."""
        step = fz.shard(
            fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optimizer),
            level=3 if donate else 0,
            group=SingleRank(),
            donate=donate,
            place=place,
        )
        state = step.init(params, buffers)
        for _ in range(5):
            state, _ = step(state, x)
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error")  # the sixth is looked at by nobody
        before = torch.cuda.memory_allocated() if CUDA else 0
        try:
            state, _ = step(state, x)
        finally:
            if CUDA:
                torch.cuda.set_sync_debug_mode("default")
        most = torch.cuda.max_memory_allocated() if CUDA else 0
        # Kept on the GPU, by autograd too, they would count in the next run's bytes
        found = optree.tree_map(lambda leaf: leaf.detach().cpu(), step.unshard(state).params)
        return found, Peak(before, most)

    def check(told: str, kind: str, plain: Peak, placed: Peak, saved: int, donate: bool) -> None:
        """The bounds of AdamW. `saved`: bytes that forward saves of each unit."""
        report.measured(f"{told}: bytes without a place", f"{plain.before:,} + {plain.growth:,}")
        report.measured(f"{told}: bytes with one", f"{placed.before:,} + {placed.growth:,}")
        if kind == "state":
            # The peak is in the update: few rows leave little to forward and backward. Beside
            # gradients (and updates, and new params, where nothing is donated) 1 + ahead buckets
            # of two moments are there; half a unit is for all else
            most = (1 if donate else 3) * all_params + 2 * 2 * unit + unit // 2
            less = 2 * all_params - unit // 2
            kept = plain.before - placed.before
            wanted = f"at least {less:,}"
            report.check_on_cuda(f"{told}: bytes between steps", kept, kept >= less, wanted)
        elif donate:
            # The peak is in forward and backward, and four saved tensors are there: what operators
            # ask for, the one that comes, and the one that leaves
            most = plain.growth - (num_units - 4) * saved
        else:
            # It is in the update, which saved tensors are no part of: gradients, updates, new
            # params, and a new state of two moments. Without a place forward has a higher one
            most = 5 * all_params + unit // 2
        grown = placed.growth
        wanted = f"at most {most:,}"
        report.check_on_cuda(f"{told}: growth in a step", grown, grown <= most, wanted)

    for name, make in OPTIMIZERS.items():
        for donate in (True, False):
            for kind, rows in (("state", 64), ("saved", 64 if report.tiny else 8192)):
                told = f"{kind} of {name}{'' if donate else ', not donated'}"
                with report.failing(told):
                    x = torch.randn(rows, width, device=DEVICE)
                    plain, before = run(x, make(), donate, None)
                    placed, after = run(x, make(), donate, {kind: fz.places.Host()})
                    same = all(torch.equal(plain[path], placed[path]) for path in plain)
                    report.check_result(f"{told}: params", "equal", same, "to the bit")
                    if name == "adamw":
                        check(told, kind, before, after, 4 * rows * width, donate)
