"""Fewer bytes on the wire or in memory, here and elsewhere: `python tests/benchmarks/compression.py
--size small --rounds 12`.

Each row is an option of somebody: gradients or params sent in 16 or 8 bits, compute in half
precision, or a part of a rank's tensors elsewhere. A GPT-like model, AdamW, float32, two gloo ranks
with a thread each, all on this machine. What is measured:

- sent: what a rank's sockets have sent a step, by the kernel's count (TCP_INFO).
- peak: the most that malloc has given away in a step, above what was live before building, on all
  threads (`malloc_peak.c`, which needs gcc). Mapped files are not in it.
- losses, updates: how far the losses, and what the steps add to the params, are from those of one
  process, uncompressed, on the same batches: the largest difference of the losses, and the norm of
  the updates' difference relative to that of the updates.
- step, CPU: each round takes one step of everyone in turn, in the same two processes, from a
  barrier on. The median over rounds of the ratio to DDP's step in that round: by the slower rank's
  clock, and by both ranks' CPU seconds, which other programs on the machine disturb less.

The first three come from fresh processes for each row, whose failure is the row's text. FairScale's
rows need `pip install --no-build-isolation fairscale==0.4.13`. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import platform
import re
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import functorch_zero as fz
from functorch_zero.compress import Blocks
from tests.benchmarks import adapters, contenders, malloc, optimizers
from tests.benchmarks.options import add_some_of, parser_of
from tests.benchmarks.rank import everyone, sent_bytes

RANKS = 2
NUM_STEPS, MEASURED = 12, 3  # of each row, of which the last are steady
Make = Callable[[str], Any]  # a contender, of a model's size
BF16, FP16, INT8 = torch.bfloat16, torch.float16, Blocks(torch.int8, 256)
ADAMW = optimizers.Setup(
    lambda: adapters.adamw(contenders.ADAMW["lr"]),
    [(torch.optim.AdamW, contenders.ADAMW, optimizers.everything)],
)


def ours(level: int, precision: fz.Precision | None = None, **options: Any) -> Make:
    """This library, with options of `shard`."""
    named = {"level": level, "precision": precision, "options": options}
    made: Any = type("Ours", (adapters.Adapter,), named)
    return lambda size: made(contenders.model_fn(size), contenders.ADAMW["lr"], RANKS, "")


def peer(kind: type[optimizers.Peer], **attributes: Any) -> Make:
    """Another library's, with other class attributes."""
    made = type(kind.__name__, (kind,), attributes)
    return lambda size: made(contenders.model_fn(size), ADAMW)


class DDP(optimizers.Peer):
    """With a communication hook, and what it is registered with."""

    hook: tuple[Any, ...] | None = None

    def wrap(self, model: nn.Module, setup: optimizers.Setup) -> tuple[nn.Module, list[Any]]:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.hook is not None:
            make_state, hook = self.hook
            wrapped.register_comm_hook(make_state(), hook)
        return wrapped, super().wrap(model, setup)[1]

    def full_params(self) -> dict[str, Tensor]:
        return {k.removeprefix("module."): p.detach() for k, p in self.model.named_parameters()}


class OssDDP(optimizers.Oss):
    def wrap(self, model: nn.Module, setup: optimizers.Setup) -> tuple[nn.Module, list[Any]]:
        _, made = super().wrap(model, setup)
        return DistributedDataParallel(model, gradient_as_bucket_view=True), made


def no_state() -> None:
    """Of a hook."""


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)


def disk() -> fz.places.File:
    return fz.places.File(tempfile.gettempdir())


HALF = {"mp_policy": MixedPrecisionPolicy(BF16)}
HALF_REDUCED_IN_32 = {"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}
BASE = "DDP"
TABLES: dict[str, dict[str, Make]] = {
    "gradients": {
        BASE: peer(DDP),
        "DDP, `fp16_compress_hook`": peer(DDP, hook=(no_state, default_hooks.fp16_compress_hook)),
        "DDP, `bf16_compress_hook`": peer(DDP, hook=(no_state, default_hooks.bf16_compress_hook)),
        "DDP, `quantization_pertensor_hook`": peer(
            DDP, hook=(no_state, quantization_hooks.quantization_pertensor_hook)
        ),
        "DDP, `quantization_perchannel_hook`": peer(
            DDP, hook=(no_state, quantization_hooks.quantization_perchannel_hook)
        ),
        "DDP, `powerSGD_hook` of rank 4": peer(DDP, hook=(power_sgd, powerSGD_hook.powerSGD_hook)),
        "**level 0**": ours(0),
        "**level 0**, `reduce=torch.float16`": ours(0, fz.Precision(reduce=FP16)),
        "**level 0**, `reduce=torch.bfloat16`": ours(0, fz.Precision(reduce=BF16)),
        "**level 0**, `reduce=Blocks(torch.int8, 256)`": ours(0, fz.Precision(reduce=INT8)),
    },
    "pieces": {
        "OSS, DDP": peer(OssDDP),
        "OSS `broadcast_fp16=True`, DDP": peer(OssDDP, oss_options={"broadcast_fp16": True}),
        "OSS, SDP": peer(optimizers.Oss),
        "OSS, SDP `reduce_buffer_size=0`": peer(optimizers.Oss, options={"reduce_buffer_size": 0}),
        "OSS, SDP `reduce_fp16=True, reduce_buffer_size=0`": peer(
            optimizers.Oss, options={"reduce_buffer_size": 0, "reduce_fp16": True}
        ),
        "OSS `broadcast_fp16=True`, SDP `reduce_fp16=True, reduce_buffer_size=0`": peer(
            optimizers.Oss,
            oss_options={"broadcast_fp16": True},
            options={"reduce_buffer_size": 0, "reduce_fp16": True},
        ),
        "**level 1**": ours(1),
        "**level 1**, `gather=torch.float16`": ours(1, fz.Precision(gather=FP16)),
        "**level 2**": ours(2),
        "**level 2**, `reduce_bucket=2**20`": ours(2, reduce_bucket=2**20),
        "**level 2**, `reduce=torch.float16`": ours(2, fz.Precision(reduce=FP16)),
        "**level 2**, `gather` and `reduce` in float16": ours(
            2, fz.Precision(gather=FP16, reduce=FP16)
        ),
        "**level 2**, `gather` and `reduce` in `Blocks(torch.int8, 256)`": ours(
            2, fz.Precision(gather=INT8, reduce=INT8)
        ),
    },
    "params": {
        "FairScale FSDP": peer(optimizers.FairScaleFSDP),
        "FairScale FSDP `mixed_precision=True`": peer(
            optimizers.FairScaleFSDP, options={"mixed_precision": True}
        ),
        "FairScale FSDP `mixed_precision=True, compute_dtype=torch.bfloat16`": peer(
            optimizers.FairScaleFSDP, options={"mixed_precision": True, "compute_dtype": BF16}
        ),
        "the same, `fp32_reduce_scatter=True`": peer(
            optimizers.FairScaleFSDP,
            options={"mixed_precision": True, "compute_dtype": BF16, "fp32_reduce_scatter": True},
        ),
        "`fully_shard`": peer(optimizers.FullyShard),
        "`fully_shard`, `param_dtype=torch.bfloat16`": peer(optimizers.FullyShard, options=HALF),
        "the same, `reduce_dtype=torch.float32`": peer(
            optimizers.FullyShard, options=HALF_REDUCED_IN_32
        ),
        "**level 3**": ours(3),
        "**level 3**, `compute` and `reduce` in bfloat16": ours(
            3, fz.Precision(compute=BF16, reduce=BF16)
        ),
        "**level 3**, `compute=torch.bfloat16`": ours(3, fz.Precision(compute=BF16)),
        "**level 3**, `gather` and `reduce` in bfloat16": ours(
            3, fz.Precision(gather=BF16, reduce=BF16)
        ),
        "**level 3**, `gather` and `reduce` in `Blocks(torch.int8, 256)`": ours(
            3, fz.Precision(gather=INT8, reduce=INT8)
        ),
    },
    "elsewhere": {
        "FairScale FSDP `move_params_to_cpu=True`": peer(
            optimizers.FairScaleFSDP, options={"move_params_to_cpu": True}
        ),
        "`fully_shard`, `CPUOffloadPolicy(pin_memory=False)`": peer(
            optimizers.FullyShard, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        ),
        '**level 3**, `place={"state": File(...)}`': ours(3, place={"state": disk()}),
        "**level 3**, params, gradients and state in files": ours(
            3, place={"state": disk(), "params": disk(), "gradients": disk()}
        ),
        "**level 3**, saved tensors, too": ours(
            3, place=dict.fromkeys(("state", "params", "gradients", "saved"), disk())
        ),
    },
}
ROWS = {label: make for rows in TABLES.values() for label, make in rows.items()}


def quiet() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def measured(label: str, size: str) -> dict[str, float]:
    """A row's bytes, and how far it is from one process. In fresh processes."""
    quiet()
    rank, libc = dist.get_rank(), malloc.counts()
    reference = _in_one_process(size)  # which warms up what everyone takes, too
    first = _params_of(contenders.model_fn(size)())
    gc.collect()
    before = libc.malloc_live()
    contender = ROWS[label](size)
    losses = []
    for k in range(NUM_STEPS):
        if k == NUM_STEPS - MEASURED:
            dist.barrier()
            gc.collect()
            libc.malloc_reset()
            sent = sent_bytes()
        losses.append(float(contender.step(contenders.batch_of(size, rank, k))))
    dist.barrier()
    sent, peak = sent_bytes() - sent, libc.malloc_peak() - before
    # What counts is the whole batch's loss, and some return this rank's
    means = [statistics.fmean(step) for step in zip(*everyone(losses, RANKS), strict=True)]
    updates = {k: p - first[k] for k, p in contender.full_params().items()}
    expected = {k: p - first[k] for k, p in reference[1].items()}
    assert updates.keys() == expected.keys()
    apart = torch.cat([(updates[k] - expected[k]).flatten() for k in expected])
    return {
        "sent": max(everyone(sent, RANKS)) / MEASURED,
        "peak": max(everyone(peak, RANKS)),
        "losses": max(abs(a - b) for a, b in zip(means, reference[0], strict=True)),
        "updates": float(apart.norm() / torch.cat([x.flatten() for x in expected.values()]).norm()),
    }


def _params_of(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def _in_one_process(size: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and params of the same steps on all ranks' batches."""
    alone = optimizers.Peer(contenders.model_fn(size), ADAMW)
    losses = []
    for k in range(NUM_STEPS):
        batches = [contenders.batch_of(size, r, k) for r in range(RANKS)]
        losses.append(float(alone.step(*batches)))
    return losses, _params_of(alone.model)


def timed(labels: list[str], size: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(the slower rank's seconds, both ranks' CPU seconds) of each row's steps, round by round."""
    quiet()
    made = {label: ROWS[label](size) for label in labels}
    taken: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
    num_warm = NUM_STEPS - MEASURED
    for k in range(num_warm + rounds):
        gc.collect()
        for label, contender in made.items():
            batch = contenders.batch_of(size, dist.get_rank(), k)
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            contender.step(batch)
            spent = time.perf_counter() - start, time.process_time() - cpu
            seconds, cpus = zip(*everyone(spent, RANKS), strict=True)
            if k >= num_warm:
                taken[label].append((max(seconds), sum(cpus)))
    return taken


def found(label: str, args: argparse.Namespace) -> dict[str, float] | str:
    """What fresh processes say of a row, or how it failed."""
    try:
        return fz.launch(
            measured, RANKS, label, args.size, start_method="spawn", timeout=args.timeout
        )[0]
    except Exception as error:
        return story_of(str(error))


def story_of(text: str) -> str:
    """The innermost error of a failure, short enough for a table."""
    lines = text.strip().splitlines()
    line = next((line for line in lines if "Error: " in line), lines[0])
    start = max((match.start() for match in re.finditer(r"\w+Error: ", line)), default=0)
    words = line[start:].replace("|", "/").replace("`", "'").split()
    return textwrap.shorten(" ".join(words), 100, placeholder=" …")


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def table(
    title: str,
    rows: dict[str, dict[str, float] | str],
    taken: dict[str, list[tuple[float, float]]],
) -> str:
    """As Markdown."""
    head = [title, "sent MB", "peak MB", "step ÷ DDP", "CPU ÷ DDP", "losses apart", "updates apart"]
    lines = [head, ["---", *["---:"] * 6]]
    for label, row in rows.items():
        if isinstance(row, str):
            lines.append([label, f"`{row}`", *[""] * 5])
            continue
        cells = [f"{row[kind] / 1e6:.1f}" for kind in ("sent", "peak")]
        if label in taken:
            pairs = zip(taken[label], taken[BASE], strict=True)
            ratios = [(a[0] / b[0], a[1] / b[1]) for a, b in pairs]
            cells += [spread([x[i] for x in ratios]) for i in (0, 1)]
        else:
            cells += ["-", "-"]
        cells += [f"{x:.0e}" if x else "0" for x in (row["losses"], row["updates"])]
        lines.append([label, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def versions() -> str:
    words = [platform.machine(), f"{os.cpu_count()} cores"]
    for package in ("torch", "fairscale"):
        try:
            words.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            words.append(f"no {package}")
    return ", ".join(words)


def main() -> None:
    from tests.benchmarks.peers import say

    parser = parser_of(__doc__, ["tiny", "small", "medium"], default="small")
    parser.add_argument("--rounds", type=int, default=12, help="of timing; 0: none")
    add_some_of(parser, "--tables", TABLES)
    parser.add_argument("--timeout", type=float, default=180, help="seconds a row, untimed")
    args = parser.parse_args()
    with malloc.preloaded():
        rows: dict[str, dict[str, dict[str, float] | str]] = {}
        for title in args.tables:
            rows[title] = {}
            for label in TABLES[title]:
                rows[title][label] = found(label, args)
                say(f"{label}: {rows[title][label]}")
    alive = [k for part in rows.values() for k, row in part.items() if not isinstance(row, str)]
    taken = {}
    if args.rounds:
        labels = [BASE, *(label for label in alive if label != BASE)]
        taken = fz.launch(timed, RANKS, labels, args.size, args.rounds, timeout=3600)[0]
    command = " ".join(["python tests/benchmarks/compression.py", *sys.argv[1:]])
    print(f"`{command}`: {time.strftime('%Y-%m-%d')}, {versions()}; {args.rounds} rounds.")
    for title in args.tables:
        print(f"\n{table(f'{title}, {args.size}', rows[title], taken)}", flush=True)


if __name__ == "__main__":
    main()
