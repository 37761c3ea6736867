"""Minutes of training on ranks that are killed, stopped and refused by the disk, with files that
are damaged meanwhile.

    $ PYTHONPATH=. python tests/soak.py --seconds 300 --ranks 3

Ends with an account of every committed step: all there and intact but for those that were damaged
on purpose, which `verify` has named; and the final state has the digest of a run to which nothing
happened. tests/checkpoint/test_soak.py runs a few seconds of it, and minutes in the full tier.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch._dynamo  # noqa: F401  # once, not in every forked rank

from functorch_zero import checkpoint, optim
from functorch_zero.checkpoint import CheckpointError
from functorch_zero.groups import ProcessGroup, launch
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step

EVERY = 5  # steps from one checkpoint to the next
FAULTS = ("kill", "stop", "raise", "full", "none")
TIMEOUT = 3.0  # seconds a collective may take


def example() -> ModuleType:
    """examples/resume.py: its model, batches and digest."""
    path = Path(__file__).parents[1] / "examples" / "resume.py"
    spec = importlib.util.spec_from_file_location("resume", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def strike(fault: str, now: dict[str, bool]) -> None:
    """What happens to a rank at some moment, from a thread beside whatever it does then."""
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault == "raise":
        now["raise"] = True
    elif fault == "full":
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )


def train(
    root: Path, journal: Path | None, until: int, level: int, fault: str, victim: int, delay: float
) -> str:
    """One rank of one attempt: from the newest checkpoint to step `until`; rank 0 notes each save
    that has returned."""
    lib, group, now = example(), ProcessGroup(timeout=TIMEOUT), {"raise": False}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    apply, params, buffers = functionalize(lib.make_model())

    def loss_fn(p: Any, b: Any, batch: Any) -> Any:
        output, new = apply(p, b, batch["x"])
        return (output - batch["y"]).square().mean(), Aux(buffers=new)

    step = shard(train_step(loss_fn, optim.adamw(1e-2)), level=level, group=group)
    state = step.init(params, buffers)
    if checkpoint.latest(root) is not None:
        state, _ = checkpoint.load(root, step, like=state)
    if group.rank == victim and fault != "none":
        threading.Timer(delay, strike, (fault, now)).start()
    while int(state.step) < until:
        if now["raise"]:
            raise ValueError("bad batch")
        state, _ = step(state, lib.draw(int(state.step), group))
        if int(state.step) % EVERY == 0 and journal is not None:
            try:
                checkpoint.save(root, step, state)
            except CheckpointError as error:  # on all ranks: training goes on without this one
                assert "File too large" in str(error), error
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2
                )
            else:
                if group.rank == 0:
                    with journal.open("a") as file:
                        file.write(f"{int(state.step)}\n")
    found: str = lib.digest(step.unshard(state))
    return found


def damage(root: Path, chance: random.Random) -> int:
    """Flip a bit of a checkpoint, see that it is found, and delete it. Returns its step."""
    count = chance.choice(sorted(checkpoint.verify(root)))
    folder = root / f"step-{count:012d}"
    path = chance.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    problems = checkpoint.verify(root, count=count)[count]
    assert problems and path.name in problems[0], (path, problems)
    shutil.rmtree(folder)
    return count


def soak(seconds: float, ranks: int, level: int, seed: int) -> Counter[str]:
    """Attempts until the time is over, then one to the end, and the account. What happened, how
    often."""
    chance, happened = random.Random(seed), Counter[str]()
    launch(int, 1, start_method="fork")  # libuv keeps a pipe for signals from the first store on
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    with tempfile.TemporaryDirectory() as name:
        root, journal = Path(name) / "root", Path(name) / "journal"
        root.mkdir()
        journal.touch()
        damaged: set[int] = set()
        give_up = time.monotonic() + seconds
        while (going_on := time.monotonic() < give_up) or not happened["to the end"]:
            fault, until = (
                chance.choice(FAULTS) if going_on else "to the end",
                (checkpoint.latest(root) or 0) + 20,
            )
            victim = chance.randrange(ranks)
            happened[fault] += 1
            arguments = (
                root,
                journal,
                until,
                level,
                fault if going_on else "none",
                victim,
                chance.uniform(0.0, 1.0),
            )
            try:
                final = launch(train, ranks, *arguments, start_method="fork", timeout=60)
            except TimeoutError:
                raise
            except Exception as error:
                assert going_on, error
                happened[f"  seen as {type(error).__name__}"] += 1
            account(root, journal, damaged)
            if going_on and chance.random() < 0.2 and checkpoint.latest(root) is not None:
                damaged.add(damage(root, chance))
                happened["bit flipped"] += 1
        happened["steps"] = until
        happened["commits"] = len(checkpoint.verify(root))
        assert not list(root.glob(".tmp*")), list(root.iterdir())
        clean = launch(
            train,
            ranks,
            Path(name) / "clean",
            None,
            until,
            level,
            "none",
            0,
            0.0,
            start_method="fork",
        )
        assert clean == final, f"after {until} steps: {clean[0]} undisturbed, {final[0]} here"
    assert threading.active_count() == threads
    left = {name: _target(name) for name in set(os.listdir("/proc/self/fd")) - descriptors}
    assert not any(left.values()), left
    return happened


def _target(descriptor: str) -> str:
    """The file or socket of a descriptor; nothing for one that is closed by now."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def account(root: Path, journal: Path, damaged: set[int]) -> None:
    """Every save that has returned is there, unless it was damaged on purpose, and all that is
    there is intact."""
    committed = set(map(int, journal.read_text().split()))
    there = checkpoint.verify(root)
    assert not any(there.values()), there
    assert committed - damaged <= set(there), (committed - damaged, set(there))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--level", type=int, default=3, choices=range(4))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for what, count in soak(args.seconds, args.ranks, args.level, args.seed).items():
        print(f"{count:6d}  {what}")


if __name__ == "__main__":
    main()
