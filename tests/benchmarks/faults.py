"""What fully_shard, DDP and this library do when one of two ranks differs, fails or is lost.

    $ PYTHONPATH=. python tests/benchmarks/faults.py  # every case, in about five minutes
    $ PYTHONPATH=. python tests/benchmarks/faults.py order --lib fsdp

Over gloo, with a time limit of 10 s for collectives. For each rank: what it raised, in which time,
or the loss of its last step and a digest of its whole params. Two digests that differ, or one loss
that is NaN, and no error: silent.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim

LIMIT, STEPS = 10, 3  # seconds a collective may take; steps


class Model(nn.Module):
    """Two equal layers, which a rank may call in the other order."""

    def __init__(self, width: int, depth: int, turned: bool, swapped: bool, skips: bool):
        super().__init__()
        self.first = nn.Linear(8, width)
        shape = (width, 2 * width) if not turned else (2 * width, width)
        self.odd = nn.Parameter(torch.ones(shape))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.swapped, self.skips = swapped, skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        layers = list(self.layers)[self.skips :]
        for layer in reversed(layers) if self.swapped else layers:
            x = torch.tanh(layer(x))
        return x.sum(1) + self.odd.sum()


CASES = {
    "width": "a layer of width 17 instead of 16",
    "depth": "three layers instead of two",
    "dtype": "bfloat16 instead of float32",
    "numel": "a leaf of another shape and as many elements",
    "order": "its layers run in another order",
    "lr": "another learning rate",
    "seed": "another seed for the initial values",
    "raises": "it raises in the loss, and lives on",
    "killed": "it is killed",
    "stopped": "it is stopped",
    "short": "its loop is one step shorter",
    "empty": "its batch is empty",
    "nan": "its batch has a NaN",
    "batch": "its batch is of float64",
    "unused": "its loss leaves out a layer",
}


def model_of(case: str, odd_one: bool) -> nn.Module:
    torch.manual_seed(1 if odd_one and case == "seed" else 0)
    odd = {name: odd_one and case == name for name in CASES}
    model = Model(
        17 if odd["width"] else 16,
        3 if odd["depth"] else 2,
        odd["numel"],
        odd["order"],
        odd["unused"],
    )
    return model.bfloat16() if odd["dtype"] else model


def batch_of(case: str, odd_one: bool, step: int) -> Tensor:
    """This rank's batch; what happens to the rank in the second step happens here."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    x = x.bfloat16() if odd_one and case == "dtype" else x
    if odd_one and step == 1:
        if case == "raises":
            raise ValueError("bad batch")
        if case in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
        if case == "nan":
            x[0, 0] = float("nan")
        x = x.double() if case == "batch" else x
        return x[:0] if case == "empty" else x
    return x


def train_theirs(case: str, lib: str) -> str:
    odd_one = dist.get_rank() == 1
    model: Any = model_of(case, odd_one)
    if lib == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if odd_one and case == "lr" else 0.01)
    for step in range(STEPS - (odd_one and case == "short")):
        optimizer.zero_grad()
        loss = model(batch_of(case, odd_one, step)).square().mean()
        loss.backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return f"loss {loss.item():.4f}, params {sum(p.double().abs().sum() for p in whole).item():.6f}"


def train_ours(case: str) -> str:
    odd_one = dist.get_rank() == 1
    apply, params, buffers = fz.functionalize(model_of(case, odd_one))
    optimizer = optim.adamw(0.1 if odd_one and case == "lr" else 0.01)
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optimizer)
    sharded = fz.shard(step, level=3, group=fz.ProcessGroup(timeout=LIMIT))
    state = sharded.init(params, buffers)
    with fz.propagate_failures(sharded):
        for i in range(STEPS - (odd_one and case == "short")):
            state, metrics = sharded(state, batch_of(case, odd_one, i))
    whole = sharded.unshard(state).params.values()
    return (
        f"loss {metrics['loss'].item():.4f}, params "
        f"{sum(p.double().abs().sum() for p in whole).item():.6f}"
    )


def outcomes(case: str, lib: str) -> list[str]:
    """What each rank says of itself; nothing from one that died."""
    with tempfile.TemporaryDirectory() as folder:

        def run() -> None:
            start = time.monotonic()
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT), dist.group.WORLD)
            fn: Callable[[], str] = lambda: (
                train_ours(case) if lib == "ours" else train_theirs(case, lib)
            )
            try:
                said = fn()
            except Exception as error:
                said = (
                    f"{type(error).__name__} after {time.monotonic() - start:.1f} s: "
                    f"{str(error).splitlines()[0]}"
                )
            Path(folder, str(dist.get_rank())).write_bytes(pickle.dumps(said))
            if case == "raises":
                time.sleep(LIMIT + 3)  # it lives on
            os._exit(0)

        with suppress(Exception):
            fz.launch(run, 2, start_method="fork", timeout=LIMIT + 8)
        paths = [Path(folder, str(rank)) for rank in range(2)]
        return [
            pickle.loads(path.read_bytes())[:150] if path.exists() else "died, or hung"
            for path in paths
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), metavar="case", help=", ".join(CASES)
    )
    parser.add_argument(
        "--lib", nargs="+", default=["fsdp", "ddp", "ours"], choices=["fsdp", "ddp", "ours"]
    )
    args = parser.parse_args()
    for case in args.cases:
        print(f"{case}: on rank 1, {CASES[case]}")
        for lib in args.lib:
            for rank, said in enumerate(outcomes(case, lib)):
                print(f"  {lib:5s} rank {rank}: {said}", flush=True)


if __name__ == "__main__":
    main()
