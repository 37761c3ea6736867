"""Tables of a million rows, here and under DDP: `python tests/benchmarks/tables.py`.

The two towers of `examples/recommender.py` in float32, on two gloo ranks with a thread each, all on
this machine. Adagrad for tables and AdamW for towers, of which DDP's are torch's. Each row is from
fresh processes, and from its last steps:

- sent: what a rank's sockets have sent a step, by the kernel's count (TCP_INFO).
- kept: what malloc has given away between steps, above what was live before building.
- peak: the most of it in a step, on all threads (`malloc_peak.c`, which needs gcc).
- step: the slower rank's median milliseconds from a barrier on; CPU: both ranks' CPU milliseconds.
- loss: the last step's, a mean over ranks; Adagrad by element has the same in all rows.

Linux only.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import recommender
import torch
import torch.distributed as dist
from recommender import SIZES, Size, Tower, TwoTowers, kind, loss_and_recall, ratings
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

import functorch_zero as fz
from functorch_zero import optim
from tests.benchmarks import malloc
from tests.benchmarks.options import parser_of
from tests.benchmarks.rank import everyone, sent_bytes

RANKS = 2
NUM_STEPS, MEASURED = 16, 10  # of each row, of which the last are steady
Step = Callable[[tuple[Tensor, Tensor]], float]  # this rank's ratings -> its loss


def ddp(*, sparse: bool) -> Callable[[TwoTowers], Step]:
    def make(model: TwoTowers) -> Step:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = sparse
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parts: dict[str, list[Tensor]] = {"tables": [], "towers": []}
        for path, param in model.named_parameters():
            parts[kind(path, param)].append(param)
        optimizers = [
            torch.optim.Adagrad(parts["tables"], lr=0.3),
            torch.optim.AdamW(parts["towers"], lr=3e-3),
        ]

        def step(batch: tuple[Tensor, Tensor]) -> float:
            users, items = wrapped(*batch)
            ids = [torch.empty_like(batch[1]) for _ in range(RANKS)]
            dist.all_gather(ids, batch[1])
            own = slice(dist.get_rank() * len(users), (dist.get_rank() + 1) * len(users))
            loss, _ = loss_and_recall(users, own, torch.cat(all_gather(items)), torch.cat(ids))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        return step

    return make


def ours(level: int, of_tables: optim.Transform) -> Callable[[TwoTowers], Step]:
    def make(model: TwoTowers) -> Step:
        apply, params, buffers = fz.functionalize(model, units=Tower)
        sharded = fz.shard(recommender.make_step(apply, of_tables), level=level)
        state = sharded.init(params, buffers)

        def step(batch: tuple[Tensor, Tensor]) -> float:
            nonlocal state
            state, metrics = sharded(state, batch)
            return metrics["loss"].item()

        return step

    return make


ROWS: dict[str, Callable[[TwoTowers], Step]] = {
    "DDP, dense gradients": ddp(sparse=False),
    "DDP, sparse gradients": ddp(sparse=True),
    "**level 0**": ours(0, optim.rows.adagrad(0.3)),
    "**level 1**": ours(1, optim.rows.adagrad(0.3)),
    "**level 3**": ours(3, optim.rows.adagrad(0.3)),
    "**level 3**, `rows.adagrad_by_row`": ours(3, optim.rows.adagrad_by_row(0.3)),
}


def own_ratings(number: int, size: Size) -> tuple[Tensor, Tensor]:
    """This rank's part of a step's batch."""
    users, items = (x.chunk(RANKS)[dist.get_rank()].clone() for x in ratings(number, size))
    return users, items


def measured(label: str, size: Size) -> dict[str, float]:
    """A row of the table, in megabytes and milliseconds. In fresh processes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    libc = malloc.counts()
    gc.collect()
    before = libc.malloc_live()
    torch.manual_seed(0)
    step = ROWS[label](TwoTowers(size.num_rows))
    times, cpus, kept, sent = [], [], 0, 0
    for number in range(NUM_STEPS):
        if number == NUM_STEPS - MEASURED:
            gc.collect()
            kept = libc.malloc_live() - before
            libc.malloc_reset()
            dist.barrier()
            sent = sent_bytes()
        own = own_ratings(number, size)
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        loss = step(own)
        times.append(time.perf_counter() - start)
        cpus.append(time.process_time() - cpu)
    sent, peak = sent_bytes() - sent, libc.malloc_peak() - before
    slower = [max(pair) for pair in zip(*everyone(times[-MEASURED:], RANKS), strict=True)]
    both = [sum(pair) for pair in zip(*everyone(cpus[-MEASURED:], RANKS), strict=True)]
    return {
        "sent MB": max(everyone(sent, RANKS)) / MEASURED / 1e6,
        "kept MB": max(everyone(kept, RANKS)) / 1e6,
        "peak MB": max(everyone(peak, RANKS)) / 1e6,
        "step ms": 1e3 * statistics.median(slower),
        "CPU ms": 1e3 * statistics.median(both),
        "loss": statistics.fmean(everyone(loss, RANKS)),
    }


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The rows, as Markdown."""
    lines = []
    for label, row in rows.items():
        if not lines:
            lines += ["| two towers | " + " | ".join(row) + " |", "|---|" + "---:|" * len(row)]
        cells = [f"{x:.4f}" if name == "loss" else f"{x:.1f}" for name, x in row.items()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    args = parser_of(__doc__, SIZES, default="million").parse_args()
    with malloc.preloaded():
        rows = {
            label: fz.launch(measured, RANKS, label, SIZES[args.size], timeout=180)[0]
            for label in ROWS
        }
    print(table(rows))


if __name__ == "__main__":
    main()
