"""Train, save and resume: a run that outlives killed, failing and stuck ranks, and ends as if
nothing had been.

    $ export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # see docs/howto/reliability.md
    $ torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --root runs/a
    $ torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --root runs/b
    --fault kill --at 25

Both print the same digest of the final state. With another number of ranks it is equal but for
rounding.
"""

import argparse
import hashlib
import os
import signal
import tempfile
import time

import torch
from optree import tree_leaves
from torch import nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim

ROWS = 12  # of a batch over all ranks


def make_model() -> nn.Module:
    """With dropout, whose masks are a function of seed, step and rank, and BatchNorm, whose
    averages are buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)
    ).double()


def draw(number: int, group: fz.Group) -> dict[str, torch.Tensor]:
    """This rank's share of a batch, which is a function of its number."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    mine = fz.data.share(x, group)
    return {"x": mine, "y": mine.sin().sum(1, keepdim=True)}


def strike(fault: str) -> None:
    """What may happen to a rank."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ValueError("bad batch")
    time.sleep(3600)


def digest(state: fz.State) -> str:
    """Of every bit of a whole state."""
    made = hashlib.sha256()
    for leaf in tree_leaves(state):
        made.update(leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def train(args: argparse.Namespace) -> str:
    """What one rank does, in every attempt: go on from the newest checkpoint, or begin."""
    group = fz.ProcessGroup(timeout=args.timeout)
    apply, params, buffers = fz.functionalize(make_model())

    def loss_fn(params, buffers, batch):
        output, buffers = apply(params, buffers, batch["x"])
        return (output - batch["y"]).square().mean(), fz.Aux(buffers=buffers)

    step = fz.shard(fz.train_step(loss_fn, optim.adamw(1e-2)), level=args.level, group=group)
    state, first = step.init(params, buffers), 0
    if checkpoint.latest(args.root) is not None:
        state, user = checkpoint.load(args.root, step, like=state)
        first = user["batches"]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if group.rank == 0:
        print(f"attempt {attempt}: {group.size} ranks from step {first}", flush=True)

    unlucky = args.fault is not None and attempt == "0" and group.rank == group.size - 1
    for number in range(first, args.steps):
        if unlucky and number == args.at:
            if args.inside_save:
                # What a save calls last of all for each file
                os.fsync = lambda file: strike(args.fault)
            else:
                strike(args.fault)
        state, _ = step(state, draw(number, group))
        if (number + 1) % args.every == 0:
            checkpoint.save(args.root, step, state, user={"batches": number + 1})
        time.sleep(args.pause)
    found = digest(step.unshard(state))
    if group.rank == 0:
        print(f"step {int(state.step)} digest {found}", flush=True)
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", help="the folder of checkpoints; by default a temporary one")
    parser.add_argument("--level", type=int, default=3, choices=range(4))
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes to start, when torchrun did not"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--every", type=int, default=10, help="steps from one checkpoint to the next"
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds a collective may take")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    parser.add_argument(
        "--fault", choices=("kill", "raise", "hang"), help="of the last rank, in the first attempt"
    )
    parser.add_argument("--at", type=int, default=25, help="the step in which it happens")
    parser.add_argument(
        "--inside-save", action="store_true", help="in the save that follows, rather than at once"
    )
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.root = args.root or folder
        fz.launch(train, args.ranks, args)


if __name__ == "__main__":
    main()
