"""A training job whose ranks run on several machines, with a gate: in the loss of one step, or in
one save, each rank waits until it may go on, so that something can happen to it there."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from optree import tree_leaves
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from tests.machines.machines import CABLE, Machines

STEPS, EVERY = 10, 4  # steps of a job, and from one checkpoint to the next
GATE_STEP, GATE_SAVE = 6, 8  # the steps in, and after, which something happens
ROWS = 24  # of a batch over all ranks

Moment = Literal["step", "save"]


def training(in_loss: Callable[[], None] = lambda: None) -> tuple[Any, Any, Any]:
    """A step, unsharded, and its first params and buffers, float64."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, 16), block(), block(), nn.Linear(16, 1))
    apply, params, buffers = fz.functionalize(model.double(), units=nn.Sequential)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        in_loss()
        out, _ = apply(params, buffers, x)
        loss = (out - x.sin().sum(1, keepdim=True)).square().mean()
        return loss, fz.Aux(weight=len(x))

    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    return fz.train_step(loss_fn, optimizer), params, buffers


def batch(number: int) -> Tensor:
    """The batch of a step, over all ranks."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)


class Ended(NamedTuple):
    """How a rank ended."""

    error: str  # the type's name; "": it came to the end
    text: str
    at: float  # time.monotonic()
    first_step: int


class Job:
    """Ranks as forked processes.

    Args:
        folder: of this job, for what the ranks note.
        root: of the checkpoints, which all machines see.
        on: the machines, each with `ranks` ranks; the first serves torch's store.
        moment: of the gate; None: nothing happens.
        limit: of the group, in seconds.
    """

    def __init__(
        self,
        machines: Machines,
        folder: Path,
        root: Path,
        on: list[int],
        ranks: int,
        moment: Moment | None,
        limit: float,
    ) -> None:
        folder.mkdir()
        self.folder, self.root, self.moment, self.limit = folder, root, moment, limit
        self.places = [machine for machine in on for _ in range(ranks)]  # by rank
        self.pids: dict[int, int] = {}  # by rank, of those that may still run
        self.codes: dict[int, int] = {}  # by rank, of those that have ended
        store = {"MASTER_ADDR": machines.address(on[0]), "MASTER_PORT": "29500"}
        for rank, machine in enumerate(self.places):
            self.pids[rank] = os.fork()
            if not self.pids[rank]:
                self._run(rank, machine, machines, store)

    def ranks_on(self, machine: int) -> list[int]:
        return [rank for rank, place in enumerate(self.places) if place == machine]

    def await_gate(self) -> None:
        """Until all ranks are there."""
        self._await(lambda: len(list(self.folder.glob("gate-*"))) == len(self.places), 60.0)

    def open_gate(self) -> None:
        (self.folder / "go").touch()

    def let_raise(self, rank: int) -> None:
        """Once the gate is open."""
        (self.folder / f"raise-{rank}").touch()

    def send(self, signum: int, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signum)

    def await_end(self, ranks: list[int], seconds: float) -> dict[int, Ended]:
        """How these ranks end within that time; those that don't are missing."""
        self._await(lambda: not self._collect() & set(ranks), seconds, must=False)
        notes = {rank: self.folder / f"ended-{rank}" for rank in ranks}
        return {
            rank: Ended(*json.loads(note.read_text()))
            for rank, note in notes.items()
            if note.exists() and rank in self.codes
        }

    def kill(self) -> None:
        """End what still runs."""
        self.send(signal.SIGKILL, list(self._collect()))
        self._await(lambda: not self._collect(), 30.0)

    def final(self) -> list[Tensor]:
        """The whole params at the end."""
        leaves: list[Tensor] = torch.load(self.folder / "final.pt")
        return leaves

    def _collect(self) -> set[int]:
        """The ranks whose processes still run."""
        for rank, pid in list(self.pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                del self.pids[rank]
        return set(self.pids)

    def _await(self, there: Callable[[], bool], seconds: float, *, must: bool = True) -> None:
        give_up = time.monotonic() + seconds
        while not there() and time.monotonic() < give_up:
            time.sleep(0.01)
        assert there() or not must, f"not within {seconds:g} s: {self.notes()}"

    def notes(self) -> str:
        """All that the ranks have noted."""
        paths = sorted(self.folder.glob("ended-*"))
        return "\n".join(f"{path.name}: {path.read_text()}" for path in paths)

    def _run(self, rank: int, machine: int, machines: Machines, store: dict[str, str]) -> None:
        """In the forked process: to its end."""
        code = 1
        try:
            os.environ.update(store, RANK=str(rank), WORLD_SIZE=str(len(self.places)))
            os.environ["GLOO_SOCKET_IFNAME"] = CABLE
            machines.enter(machine)
            self._train(rank)
            code = 0
        except BaseException as error:
            self._note(f"ended-{rank}", type(error).__name__, str(error), time.monotonic(), -1)
            traceback.print_exc()
        finally:
            os._exit(code)

    def _train(self, rank: int) -> None:
        dist.init_process_group("gloo")
        group = fz.ProcessGroup(timeout=self.limit)
        at = -1  # the number of the step that runs

        def in_loss() -> None:
            if self.moment == "step" and at == GATE_STEP:
                self._gate(rank)

        fsync = os.fsync

        def slow_fsync(file: int) -> None:
            if self.moment == "save" and at == GATE_SAVE - 1:
                self._gate(rank)
            fsync(file)

        os.fsync = slow_fsync
        step, params, buffers = training(in_loss)
        step = fz.shard(step, level=3, group=group)
        state, first = step.init(params, buffers), 0
        if checkpoint.latest(self.root) is not None:
            state, user = checkpoint.load(self.root, step, like=state)
            first = user["batches"]
        for at in range(first, STEPS):
            state, _ = step(state, batch(at)[rank :: group.size])
            if (at + 1) % EVERY == 0:
                checkpoint.save(self.root, step, state, user={"batches": at + 1})
        whole = tree_leaves(step.unshard(state).params)
        if rank == 0:
            torch.save([leaf.detach() for leaf in whole], self.folder / "final.pt")
        group.barrier()
        self._note(f"ended-{rank}", "", socket.gethostname(), time.monotonic(), first)

    def _gate(self, rank: int) -> None:
        (self.folder / f"gate-{rank}").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.005)
        if (self.folder / f"raise-{rank}").exists():
            raise ValueError("bad batch")

    def _note(self, name: str, *values: Any) -> None:
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(values))
        part.rename(self.folder / name)
