"""Optimizers under torch's `fully_shard`: torch's own, packages of PyPI, and those of this library.

`python tests/benchmarks/under_fully_shard.py` trains a tiny float64 model for five steps of the
same batches in one process and on 2 and 4 ranks (gloo), each run in processes of its own, and
prints how far the params' updates are apart, as a Markdown table. `--write PAGE` puts it
between the two markers of a page. No package is needed: it names those that aren't installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers import it: once here, and not in every process
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import launch

STEPS, ROWS, F64 = 5, 12, torch.float64
RANKS = (2, 4)
RIGHT = 1e-11  # float64, five steps
# An optimizer may enlarge the last bits of gradients by this much more than one drawn error shows
SPREAD, MOST = 30, 1e-6
BEGIN, END = "<!-- made by tests/benchmarks/under_fully_shard.py -->", "<!-- end of the table -->"

Tensors = dict[str, Tensor]
Stepper = Any  # what has step() and zero_grad()


UNEVEN, EVEN = (13, 5), (16, 8)  # rows of matrices, norms and biases: for 2 and 4 ranks


class Tiny(nn.Module):
    """Matrices, norms and biases of so many rows."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        return self.last(h + torch.tanh(self.middle(h)))


def batches(outputs: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    drawn = torch.randn(STEPS, ROWS, 6, generator=g, dtype=F64)
    return [(x, x.repeat(1, 2)[:, :outputs].sin()) for x in drawn]


class Candidate(NamedTuple):
    """An optimizer to try."""

    package: str  # its name on PyPI
    name: str
    make: Callable[[nn.Module], list[Stepper]]  # imports the package
    why: str = ""  # what makes it wrong, where it is
    casts: bool = False  # it computes in bfloat16, and float64 takes its place here
    module: str = ""  # its package's, imported before the processes start


# What makes optimizers wrong

LOCAL_SUMS = (
    "`.item()` of a sum over a DTensor is the sum of this rank's part, so each rank has an "
    "estimate of its own of the step size"
)
OWN_GATHERS = "it gathers params by collectives of its own, which know no DTensors"


# The candidates


def matrices(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.ndim == 2]


def others(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.ndim != 2]


def plain(
    package: str,
    module: str,
    name: str,
    why: str = "",
    casts: bool = False,
    **options: Any,
) -> Candidate:
    """`module.name(model.parameters(), **options)`."""

    def make(model: nn.Module) -> list[Stepper]:
        return [getattr(importlib.import_module(module), name)(model.parameters(), **options)]

    return Candidate(package, name, make, why, casts, module)


def of_matrices(
    package: str,
    module: str,
    name: str,
    why: str = "",
    casts: bool = False,
    **options: Any,
) -> Candidate:
    """The matrices by `module.name`, and the rest by AdamW."""

    def make(model: nn.Module) -> list[Stepper]:
        made = getattr(importlib.import_module(module), name)(matrices(model), **options)
        return [made, torch.optim.AdamW(others(model), lr=1e-2)]

    return Candidate(package, name, make, why, casts, module)


def by_groups(
    package: str,
    module: str,
    name: str,
    first: dict[str, Any],
    rest: dict[str, Any],
    why: str = "",
    casts: bool = False,
) -> Candidate:
    """Two param groups: `first` are the options of matrices, `rest` those of all else."""

    def make(model: nn.Module) -> list[Stepper]:
        groups = [{"params": matrices(model)} | first, {"params": others(model)} | rest]
        return [getattr(importlib.import_module(module), name)(groups)]

    return Candidate(package, name, make, why, casts, module)


class Clipped:
    """AdamW behind torch's clipping."""

    def __init__(self, model: nn.Module):
        self.params = [*model.parameters()]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-2)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 0.05)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def ours(name: str, transform: Callable[[], optim.Transform]) -> Candidate:
    return Candidate("functorch_zero", name, lambda model: [optim.to_torch(transform(), model)])


OURS = [
    ours("adamw", lambda: optim.adamw(1e-2)),
    ours(
        "clip_by_global_norm + adamw",
        lambda: optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2)),
    ),
    ours("lion", lambda: optim.lion(1e-2)),
    ours("lamb", lambda: optim.lamb(1e-2, weight_decay=0.1)),
    ours("lars", lambda: optim.lars(1.0)),
    ours("adafactor", lambda: optim.adafactor(1e-2)),
    ours("muon", lambda: optim.muon(1e-2)),
    ours("shampoo", lambda: optim.shampoo(1e-2)),
    ours("soap", lambda: optim.soap(1e-2)),
    ours("prodigy", lambda: optim.prodigy(1.0, estim_lr0=1e-3)),
    ours("schedule_free_adamw", lambda: optim.schedule_free_adamw(1e-2)),
]

TORCH = [
    *(
        plain("torch", "torch.optim", name, lr=1e-2)
        for name in (
            "SGD",
            "Adam",
            "AdamW",
            "NAdam",
            "RAdam",
            "Adamax",
            "Adagrad",
            "Adadelta",
            "RMSprop",
            "Rprop",
            "ASGD",
        )
    ),
    plain("torch", "torch.optim", "Adafactor", lr=1e-2),
    of_matrices("torch", "torch.optim", "Muon", casts=True, lr=1e-2),
    Candidate("torch", "clip_grad_norm_ + AdamW", lambda model: [Clipped(model)]),
]

PO, TO = "pytorch_optimizer", "torch_optimizer"
MUON, REST = {"use_muon": True}, {"use_muon": False}
LOW_RANK = {"rank": 3, "update_proj_gap": 2, "scale": 1.0}
FOREIGN = [
    *(
        plain(PO, PO, name, lr=1e-2)
        for name in (
            "AdamP",
            "StableAdamW",
            "AdaBelief",
            "Adan",
            "AdEMAMix",
            "ADOPT",
            "Lion",
            "Tiger",
            "ScheduleFreeAdamW",
            "Lamb",
            "LARS",
            "NovoGrad",
            "Fromage",
            "AdaFactor",
            "CAME",
            "SM3",
            "Prodigy",
            "DAdaptAdam",
            "Shampoo",
            "SOAP",
            "Kron",
            "SCION",
            "SPlus",
        )
    ),
    plain(PO, PO, "Ranger21", num_iterations=STEPS, lr=1e-2),
    plain(
        PO,
        PO,
        "ScalableShampoo",
        lr=1e-2,
        start_preconditioning_step=1,
        preconditioning_compute_steps=1,
    ),
    plain(PO, PO, "Conda", lr=1e-2, update_proj_gap=2),
    by_groups(PO, PO, "GaLore", first=LOW_RANK | {"projection_type": "std"}, rest={}),
    by_groups(PO, PO, "APOLLO", first=LOW_RANK | {"projection_type": "random"}, rest={}),
    by_groups(PO, PO, "Muon", first=MUON, rest=REST, casts=True),
    by_groups(PO, PO, "AdaMuon", first=MUON, rest=REST, casts=True),
    by_groups(PO, PO, "NorMuon", first=MUON, rest=REST, casts=True),
    *(
        plain("torch-optimizer", TO, name, lr=1e-2)
        for name in ("Lamb", "LARS", "AdamP", "NovoGrad", "Shampoo", "Adafactor", "Yogi", "Ranger")
    ),
    plain("prodigyopt", "prodigyopt", "Prodigy", LOCAL_SUMS, lr=1.0),
    plain("dadaptation", "dadaptation", "DAdaptAdam", LOCAL_SUMS, lr=1.0),
    plain("lion-pytorch", "lion_pytorch", "Lion", lr=1e-2),
    plain("schedulefree", "schedulefree", "AdamWScheduleFree", lr=1e-2),
    plain("torch-optimi", "optimi", "AdamW", lr=1e-2),
    plain("torch-optimi", "optimi", "StableAdamW", lr=1e-2),
    of_matrices("muon-optimizer", "muon", "SingleDeviceMuon", casts=True, lr=1e-2),
    of_matrices("muon-optimizer", "muon", "Muon", OWN_GATHERS, casts=True, lr=1e-2),
    plain("transformers", "transformers.optimization", "Adafactor"),
    plain("came-pytorch", "came_pytorch", "CAME", lr=1e-2),
    by_groups(
        "galore-torch",
        "galore_torch",
        "GaLoreAdamW",
        first=LOW_RANK | {"proj_type": "std"},
        rest={},
    ),
    by_groups(
        "apollo-torch",
        "apollo_torch",
        "APOLLOAdamW",
        first=LOW_RANK | {"proj": "random", "proj_type": "std", "scale_type": "channel"},
        rest={},
    ),
    Candidate(
        "adam-mini",
        "Adam_mini",
        lambda model: [
            importlib.import_module("adam_mini").Adam_mini(
                model.named_parameters(), lr=1e-2, dim=8, n_heads=2
            )
        ],
    ),
    plain("adan-pytorch", "adan_pytorch", "Adan", lr=1e-2),
    plain("kron-torch", "kron_torch", "Kron", lr=1e-2),
    plain("torchao", "torchao.optim", "AdamW8bit", lr=1e-2),
    plain("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", lr=1e-2),
    plain("bitsandbytes", "bitsandbytes.optim", "LAMB", lr=1e-2),
    plain("timm", "timm.optim", "Lamb", lr=1e-2),
    *(
        plain("heavyball", "heavyball", name, lr=1e-2)
        for name in ("AdamW", "SOAP", "Muon", "PSGDKron")
    ),
]
CANDIDATES = [*TORCH, *FOREIGN, *OURS]


# A run


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def moved(candidate: Candidate, rows: tuple[int, int], noise: float) -> Tensors:
    """What the steps add to each param, whole, on each rank.

    Args:
        rows: of the model.
        noise: size of the drawn relative errors in gradients, of one process alone.
    """
    # Packages print as they are imported
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    warnings.simplefilter("ignore")
    if candidate.casts:
        # Its rounding would hide mistakes of a tenth
        torch.Tensor.bfloat16 = lambda x: x  # type: ignore[method-assign]
    torch.manual_seed(0)
    model: Any = Tiny(*rows).double()
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizers = candidate.make(model)
    for optimizer in optimizers:
        # Schedule-free ones have the training's params and the evaluation's
        getattr(optimizer, "train", lambda: None)()
    g = torch.Generator().manual_seed(2)
    for x, y in batches(rows[1]):
        F.mse_loss(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
        for param in model.parameters():
            if noise:
                errors = torch.randn(param.shape, generator=g, dtype=F64)
                param.grad.mul_(1 + noise * errors)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(param) - first[name] for name, param in model.named_parameters()}


def run(
    candidate: Candidate, ranks: int, rows: tuple[int, int], limit: float, noise: float = 0.0
) -> tuple[list[Tensors], str]:
    """Each rank's updates in processes of their own; or none, and what went wrong."""
    try:
        return launch(moved, ranks, candidate, rows, noise, start_method="fork", timeout=limit), ""
    except TimeoutError:
        return [], f"not done after {limit:.0f} s"
    except Exception as error:
        text = " ".join(str(error).split("\n")[0].split()).replace("|", "/")
        told = f"{type(error).__name__}: {text}".removesuffix(": ")
        return [], told if len(told) <= 60 else told[:60].rsplit(" ", 1)[0] + " …"


def distance(found: Tensors, wanted: Tensors) -> float:
    """The largest error of a leaf's update, relative to the largest element of that update."""
    worst = 0.0
    for name, update in wanted.items():
        error = float((found[name] - update).abs().max() / update.abs().max())
        worst = max(worst, error if error == error else float("inf"))
    return worst


class Row(NamedTuple):
    """A line of the table."""

    candidate: Candidate
    cells: list[str]  # per run
    is_right: bool  # in all of them


def tried(candidate: Candidate, all_ranks: Sequence[int], limit: float) -> Row:
    """Uneven rows on each number of ranks; after a crash, even ones on the last."""
    cells: list[str] = []
    is_right, has_crashed = True, False
    for rows in (UNEVEN, EVEN):
        wanted, failure = run(candidate, 1, rows, limit)
        if failure:
            return Row(candidate, [f"fails in one process, too: {failure}"], True)
        if any(float(x.abs().max()) == 0 for x in wanted[0].values()):
            return Row(candidate, ["fails in one process, too: a param doesn't move"], True)
        near, _ = run(candidate, 1, rows, limit, noise=1e-16)
        right = max(RIGHT, SPREAD * distance(near[0], wanted[0])) if near else RIGHT
        right = min(right, MOST)
        for ranks in all_ranks if rows == UNEVEN else all_ranks[-1:]:
            found, failure = run(candidate, ranks, rows, limit)
            error = max((distance(x, wanted[0]) for x in found), default=float("inf"))
            is_right &= error <= right
            has_crashed |= bool(failure)
            word = f"right ({error:.0e})" if error <= right else f"**off by {error:.0e}**"
            cells.append(failure or word)
        if not has_crashed:
            break
    return Row(candidate, cells, is_right)


# The table


def version(package: str) -> str | None:
    """None: it isn't installed."""
    if package == "functorch_zero":
        return fz.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(rows: Iterable[Row], all_ranks: Sequence[int]) -> list[str]:
    runs = [*(f"{ranks} ranks" for ranks in all_ranks), f"{all_ranks[-1]} ranks, even rows"]
    heads = ["package", "optimizer", *runs, "why"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [
            "the same" if k and cell == row.cells[k - 1] and not cell.startswith("right") else cell
            for k, cell in enumerate(row.cells)
        ]
        cells += [""] * (len(runs) - len(cells))
        name = f"{row.candidate.package} {version(row.candidate.package)}"
        why = "" if row.is_right else row.candidate.why
        lines.append(f"| {' | '.join([name, row.candidate.name, *cells, why])} |")
    return lines


def eager(fn: Any = None, **options: Any) -> Any:
    """In the place of torch.compile, which would take minutes and should change no number."""
    return eager if fn is None else fn


def main() -> None:
    torch.compile = eager
    parser = argparse.ArgumentParser(prog="under_fully_shard", description=__doc__)
    parser.add_argument("--packages", help="some, separated by commas, in place of all")
    parser.add_argument("--names", help="some optimizers, separated by commas")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each run")
    parser.add_argument("--write", type=Path, help="a page with the two markers")
    options = parser.parse_args()
    known = dict.fromkeys(candidate.package for candidate in CANDIDATES)
    packages = options.packages.split(",") if options.packages else [*known]
    if not known.keys() >= {*packages}:
        parser.error(f"argument --packages: takes some of {', '.join(known)}")
    names = options.names.split(",") if options.names else None
    all_ranks = [int(word) for word in options.ranks.split(",")]
    missing = [package for package in packages if version(package) is None]
    rows = []
    for candidate in CANDIDATES:
        if candidate.package not in packages or candidate.package in missing:
            continue
        if names is None or candidate.name in names:
            with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Exception):
                importlib.import_module(candidate.module or "torch")
            rows.append(tried(candidate, all_ranks, options.limit))
            print(table(rows[-1:], all_ranks)[-1], file=sys.stderr, flush=True)
    lines = table(rows, all_ranks)
    if missing:
        lines += ["", f"Not installed: {', '.join(missing)}."]
    text = "\n".join(lines)
    if options.write is None:
        print(text)
        return
    before, rest = options.write.read_text().split(BEGIN)
    after = rest.split(END)[1]
    options.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    # Beside this script lie a muon.py and a torch_optimizer.py, which are packages' names, too
    sys.path.pop(0)
    main()
