"""LAMB, Adafactor and Muon, here and elsewhere: `python tests/benchmarks/optimizers.py --size small
--rounds 12`.

These need norms or whole matrices, which a rank of a sharded run does not hold. So beside time,
memory and traffic it is counted how far the params' change after some steps is from the same
optimizer's in one process, on the same batches: the largest difference of a leaf relative to that
leaf's largest change, and the norm of all differences relative to the norm of all changes.
Gradients can be compared to the bit: one process takes the ranks' batches one by one, and two
summands have one order. Everyone is compared with itself, ours with `train_step`, others with their
own torch class.

Memory, traffic and state: as `peers.py`, in fresh processes. Times: as `pairs.py`, in turn in the
same two processes; relative to `alone`, plain torch without communication. FairScale's rows need
`pip install --no-build-isolation fairscale==0.4.13`; it is no dependency of anything else here.
Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import functorch_zero as fz
from functorch_zero import optim
from tests.benchmarks import adapters, contenders
from tests.benchmarks.options import add_some_of, parser_of

RANKS = 2
NUM_STEPS = 3  # of which errors are taken


class Lamb(torch.optim.Optimizer):
    """What a user writes who wants LAMB (You et al., 2020, Algorithm 2) from torch: norms of a
    parameter and its step.

    Under `fully_shard` a parameter is a DTensor, whose norm is the whole parameter's as long as it
    stays a DTensor: its `float` (`floats`) is the norm of this rank's piece. In FairScale's FSDP a
    parameter is a piece of a unit's flat parameter, and so is what the norm is of.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, floats: bool = False):
        super().__init__(
            params,
            {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "floats": floats},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "mu": torch.zeros_like(p), "nu": torch.zeros_like(p)}
                state["step"] += 1
                mu, nu = state["mu"].lerp_(p.grad, 1 - b1), state["nu"].mul_(b2)
                nu.addcmul_(p.grad, p.grad, value=1 - b2)
                c1, c2 = 1 - b1 ** state["step"], 1 - b2 ** state["step"]
                step = (nu / c2).sqrt_().add_(group["eps"]).reciprocal_().mul_(mu / c1)
                step.add_(p, alpha=group["weight_decay"])
                of_param, of_step = p.norm(), step.norm()
                if group["floats"]:
                    of_param, of_step = (torch.tensor(float(x)) for x in (of_param, of_step))
                trust = torch.where((of_param > 0) & (of_step > 0), of_param / of_step, 1.0)
                p.sub_(step.mul_(trust * group["lr"]))


def hidden(name: str, leaf: Any) -> bool:
    """Whether it is a matrix of a block, which is what Muon is for."""
    return "blocks" in name and "norm" not in name


def everything(name: str, leaf: Any) -> bool:
    return True


def others(name: str, leaf: Any) -> bool:
    return not hidden(name, leaf)


class Setup(NamedTuple):
    """An optimizer, ours and torch's: (class, arguments, which parameters) one by one."""

    ours: Callable[[], optim.Transform]
    theirs: list[tuple[Any, dict[str, Any], Callable[[str, Any], bool]]]


ADAMW: dict[str, Any] = contenders.ADAMW
SETUPS = {
    "lamb": Setup(lambda: optim.lamb(1e-3, weight_decay=0.01), [(Lamb, {"lr": 1e-3}, everything)]),
    "lamb_floats": Setup(
        lambda: optim.lamb(1e-3), [(Lamb, {"lr": 1e-3, "floats": True}, everything)]
    ),
    "adafactor": Setup(
        lambda: optim.adafactor(1e-2), [(torch.optim.Adafactor, {"lr": 1e-2}, everything)]
    ),
    "muon": Setup(
        lambda: optim.muon(
            0.02,
            ns_dtype=torch.bfloat16,  # torch's
            param_labels=lambda path, leaf: "muon" if hidden(path, leaf) else "adam",
            adam_learning_rate=ADAMW["lr"],
            adam_weight_decay=ADAMW["weight_decay"],
        ),
        [(torch.optim.Muon, {"lr": 0.02}, hidden), (torch.optim.AdamW, ADAMW, others)],
    ),
}
LEVELS = {"fz_level1": 1, "fz_level2": 2, "fz_level3": 3}
MakeModel = Callable[[], nn.Module]


class Ours(adapters.Adapter):
    """This library."""

    def __init__(self, make: MakeModel, setup: Setup, level: int):
        self.level, self.optimizer = level, lambda lr: setup.ours()
        super().__init__(make, 0.0, RANKS, "")

    def state_bytes(self) -> int:
        return self.memory()["optim"]


class Peer:
    """A wrapped module, and an optimizer for each class of the setup."""

    def __init__(self, make: MakeModel, setup: Setup):
        self.model, self.optimizers = self.wrap(make(), setup)

    def wrap(self, model: nn.Module, setup: Setup) -> tuple[nn.Module, list[Any]]:
        """`alone`: the module itself."""
        return model, _optimizers(
            model, setup, lambda make, params, options: make(params, **options)
        )

    def step(self, *batches: Any) -> Tensor:
        """Of one batch, or of the mean of several's gradients. The mean of their losses."""
        self.model.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            loss: Tensor = self.model(*batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        for optimizer in self.optimizers:
            optimizer.step()
        return torch.stack(losses).sum()

    def full_params(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {
            k.removeprefix("module."): getattr(p, "full_tensor", lambda p=p: p)().detach()
            for k, p in named
        }

    def state_bytes(self) -> int:
        states = [getattr(optimizer, "optim", optimizer).state for optimizer in self.optimizers]
        tensors = [
            x
            for state in states
            for s in state.values()
            for x in s.values()
            if isinstance(x, Tensor)
        ]
        return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors if x.dim())


def _optimizers(model: nn.Module, setup: Setup, build: Callable[..., Any]) -> list[Any]:
    named = [*model.named_parameters()]
    chosen = [
        (make, [p for k, p in named if which(k, p)], options)
        for make, options, which in setup.theirs
    ]
    return [build(make, params, options) for make, params, options in chosen if params]


class Zero(Peer):
    def wrap(self, model: nn.Module, setup: Setup) -> tuple[nn.Module, list[Any]]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def build(make: Any, params: list[Tensor], options: dict[str, Any]) -> Any:
            return ZeroRedundancyOptimizer(
                params, optimizer_class=make, parameters_as_bucket_view=True, **options
            )

        return DistributedDataParallel(model, gradient_as_bucket_view=True), _optimizers(
            model, setup, build
        )


class FullyShard(Peer):
    options: ClassVar[dict[str, Any]] = {}

    def wrap(self, model: nn.Module, setup: Setup) -> tuple[nn.Module, list[Any]]:
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, **self.options)
        return super().wrap(model, setup)


class Oss(Peer):
    """FairScale's OSS under its ShardedDataParallel."""

    oss_options: ClassVar[dict[str, Any]] = {}
    options: ClassVar[dict[str, Any]] = {}

    def wrap(self, model: nn.Module, setup: Setup) -> tuple[nn.Module, list[Any]]:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        def build(make: Any, params: list[Tensor], options: dict[str, Any]) -> Any:
            return OSS(params, optim=make, **self.oss_options, **options)

        made = _optimizers(model, setup, build)
        return ShardedDataParallel(model, made, **self.options), made


class FairScaleFSDP(Peer):
    """FairScale's FSDP. Without a GPU it needs streams that do nothing; gloo refuses what its
    bucketing sends."""

    options: ClassVar[dict[str, Any]] = {}

    def wrap(self, model: nn.Module, setup: Setup) -> tuple[nn.Module, list[Any]]:
        import fairscale.nn.data_parallel.fully_sharded_data_parallel as module

        stream = types.SimpleNamespace(wait_stream=lambda s: None, synchronize=lambda: None)
        cuda = types.SimpleNamespace(
            is_available=lambda: True,
            Stream=lambda: stream,
            current_stream=lambda: stream,
            stream=lambda s: contextlib.nullcontext(),
            synchronize=lambda: None,
        )
        module.torch = types.ModuleType("torch")
        module.torch.__getattr__ = lambda name: cuda if name == "cuda" else getattr(torch, name)
        torch.Tensor.record_stream = lambda self, stream: None
        options = {
            "compute_device": torch.device("cpu"),
            "reshard_after_forward": True,
            "bucket_cap_mb": 0,
            **self.options,
        }
        for i, block in enumerate(model.blocks):
            model.blocks[i] = module.FullyShardedDataParallel(block, **options)
        return super().wrap(module.FullyShardedDataParallel(model, **options), setup)

    def full_params(self) -> dict[str, Tensor]:
        with self.model.summon_full_params():
            named = [
                (k.replace("_fsdp_wrapped_module.", ""), p)
                for k, p in self.model.named_parameters()
            ]
            return {
                k.replace("_fpw_module.", "").replace("module.", ""): p.detach().clone()
                for k, p in named
            }


PEERS = {"zero": Zero, "oss": Oss, "fully_shard": FullyShard, "fairscale_fsdp": FairScaleFSDP}
LABELS = {
    "fz_level1": "**level 1**",
    "zero": "DDP + ZeroRedundancyOptimizer",
    "fz_level2": "**level 2**",
    "oss": "FairScale OSS + ShardedDataParallel",
    "fz_level3": "**level 3**",
    "fully_shard": "`fully_shard`",
    "fairscale_fsdp": "FairScale FSDP",
}


def build(name: str, make: MakeModel) -> Any:
    """A contender by its name, "muon:fz_level3" say."""
    optimizer, _, system = name.partition(":")
    if system in LEVELS:
        return Ours(make, SETUPS[optimizer], LEVELS[system])
    return {"alone": Peer, **PEERS}[system](make, SETUPS[optimizer])


def errors(name: str, size: str, rank: int) -> dict[str, list[float]]:
    """By dtype: how far from one process the changes of params are; [largest, norm]."""
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    if name.endswith(":fairscale_fsdp"):
        del dtypes["float64"]  # which it refuses
    return {text: _errors(name, size, rank, dtype) for text, dtype in dtypes.items()}


def _errors(name: str, size: str, rank: int, dtype: torch.dtype) -> list[float]:
    def make() -> nn.Module:
        return contenders.model_fn(size)().to(dtype)

    first = {k: p.detach() for k, p in make().named_parameters()}
    contender = build(name, make)
    for k in range(NUM_STEPS):
        contender.step(contenders.batch_of(size, rank, k))
    last = contender.full_params()
    del contender
    expected = _in_one_process(name, size, make)
    changes = {
        k: (last[k].double() - first[k].double(), expected[k].double() - first[k].double())
        for k in first
    }
    assert all(change.any() for _, change in changes.values()), "a leaf that nobody changed"
    largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in changes.values())
    off, whole = (
        torch.cat([x.flatten() for x in row])
        for row in zip(*((a - b, b) for a, b in changes.values()), strict=True)
    )
    return [largest, float(off.norm() / whole.norm())]


def _in_one_process(name: str, size: str, make: MakeModel) -> dict[str, Tensor]:
    """Params after the same steps on all ranks' batches, one after the other."""
    optimizer, _, system = name.partition(":")
    steps = [[contenders.batch_of(size, r, k) for r in range(RANKS)] for k in range(NUM_STEPS)]
    if system not in LEVELS:
        alone = Peer(make, SETUPS[optimizer])
        for batches in steps:
            alone.step(*batches)
        return alone.full_params()
    apply, params, buffers = fz.functionalize(make(), units="blocks.*")
    step = fz.train_step(
        lambda p, b, batch: apply(p, b, *batch)[0], SETUPS[optimizer].ours(), accumulate=RANKS
    )
    state = step.init(params, buffers, seed=None)
    for batches in steps:
        state, _ = step(state, tuple(map(torch.cat, zip(*batches, strict=True))))
    return {k: p.detach() for k, p in fz.named_leaves(state.params).items()}


def seconds(names: list[str], size: str, rounds: int) -> dict[str, list[float]]:
    """Of each contender's steps, round by round, by the slower rank's clock."""
    warnings.filterwarnings("ignore")
    everyone = {name: build(name, contenders.model_fn(size)) for name in names}
    rank = dist.get_rank()
    taken: dict[str, list[float]] = {name: [] for name in names}
    for k in range(rounds + 2):
        gc.collect()
        for name, contender in everyone.items():
            dist.barrier()
            start = time.perf_counter()
            contender.step(contenders.batch_of(size, rank, k))
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if k >= 2:  # the first two warm up
                taken[name].append(slowest.item())
    return taken


def measured(name: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """What fresh processes say of a contender, or how it failed."""
    from tests.benchmarks import peers

    try:
        return {"errors": peers.launch(name, "errors", args), **peers.launch(name, "size", args)}
    except (RuntimeError, TimeoutError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        story = next((line for line in lines if "Error: " in line), lines[-1])
        return story.partition("]: ")[2] or story  # without the rank


def table(optimizer: str, args: argparse.Namespace) -> str:
    """One optimizer's rows, as Markdown."""
    names = {system: f"{optimizer}:{system}" for system in LABELS if system in args.only}
    found = {system: measured(name, args) for system, name in names.items()}
    alive = [
        f"{optimizer}:alone",
        *(names[s] for s, made in found.items() if not isinstance(made, str)),
    ]
    taken = fz.launch(
        seconds, RANKS, alive, args.size, args.rounds, start_method="fork", timeout=900
    )[0]
    head = [f"{optimizer}, {args.size}", "step ÷ alone", "peak MB", "sent MB", "state MB"]
    rows = [
        [*head, "error, float32", "of norm", "error, float64", "of norm"],
        ["---", *["---:"] * 8],
    ]
    for system, made in found.items():
        if isinstance(made, str):
            rows.append([LABELS[system], made.replace("|", "/"), *[""] * 7])
            continue
        ratios = [a / b for a, b in zip(taken[names[system]], taken[alive[0]], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells = [f"{made[kind] / 1e6:.1f}" for kind in ("peak", "sent", "state")]
        off = [f"{x:.0e}" if x else "0" for pair in made["errors"].values() for x in pair]
        rows.append(
            [
                LABELS[system],
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                *cells,
                *off,
                *["-"] * (4 - len(off)),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = parser_of(__doc__, ["tiny", "small", "medium"], default="small")
    parser.add_argument("--rounds", type=int, default=12, help="of timing")
    add_some_of(parser, "--optimizers", SETUPS, default=["lamb", "adafactor", "muon"])
    add_some_of(parser, "--only", LABELS)
    parser.add_argument("--timeout", type=float, default=180, help="seconds a contender")
    args = parser.parse_args()
    args.ranks, args.warmup, args.steps = RANKS, 3, 3
    command = " ".join(["python tests/benchmarks/optimizers.py", *sys.argv[1:]])
    print(
        f"`{command}`: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, "
        "torch"
    )
    print(
        f"{torch.__version__}; {RANKS} ranks, {args.rounds} rounds; errors after {NUM_STEPS} steps."
    )
    for optimizer in args.optimizers:
        print(f"\n{table(optimizer, args)}", flush=True)


if __name__ == "__main__":
    main()
