"""Stage "places": the optimizer's state and saved tensors in the host's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups.single import SingleRank
from tests.gpu.report import CUDA, DEVICE, Report


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optim.adamw(1e-3),
    "clip, unfused": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.scale_by_adam(), optim.scale_by_learning_rate(1e-3)
    ),
    "muon": lambda: optim.muon(1e-3),
    "adafactor": lambda: optim.adafactor(1e-3),
}


def places(report: Report) -> None:
    width, num_units, rows = (16, 4, 64) if report.tiny else (2048, 12, 8192)
    model = nn.Sequential(*(Layer(width) for _ in range(num_units)))
    apply, params, buffers = fz.functionalize(model.to(DEVICE), units=Layer)
    x = torch.randn(rows, width, device=DEVICE)
    unit = 4 * width * (width + 1)  # bytes of one unit's params

    def run(optimizer: Any, level: int, donate: bool, place: Any) -> tuple[Any, int]:
        """The params after some steps, and the most bytes on the GPU in one."""
        step = fz.shard(
            fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optimizer),
            level=level,
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
        try:
            state, _ = step(state, x)
        finally:
            if CUDA:
                torch.cuda.set_sync_debug_mode("default")
        peak = torch.cuda.max_memory_allocated() if CUDA else 0
        return step.unshard(state).params, peak

    for name, make in OPTIMIZERS.items():
        for donate in (True, False):
            for kind in ("state", "saved"):
                told = f"{kind} of {name}{'' if donate else ', not donated'}"
                with report.failing(told):
                    level = 3 if donate else 0
                    plain, before = run(make(), level, donate, None)
                    placed, after = run(make(), level, donate, {kind: fz.places.Host()})
                    same = all(torch.equal(plain[path], placed[path]) for path in plain)
                    report.check_result(f"{told}: params", "equal", same, "to the bit")
                    moved = num_units * (2 * unit if kind == "state" else 4 * rows * width)
                    # Two buckets of the state, or what three operators ask for, are there
                    left = 4 * unit if kind == "state" else 4 * 4 * rows * width
                    saved, bound = before - after, moved - left
                    if name == "adamw":
                        wanted = f"at least {bound:,} less"
                        report.check_on_cuda(f"{told}: peak memory", -saved, saved >= bound, wanted)
