"""Machines that are cut off, stopped, killed, or lose power: the others raise soon, name who is
lost, and go on from the last checkpoint with the numbers of one process."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from optree import tree_leaves

from functorch_zero import checkpoint
from tests.checkpoints import leftovers
from tests.machines.job import EVERY, GATE_SAVE, STEPS, Job, Moment, batch, training
from tests.machines.machines import CannotMake, Machines, made
from tests.tiers import FULL

pytestmark = FULL

LIMIT = 4.0  # seconds, of the groups
SOON = 5.0  # seconds beyond it
LATEST = GATE_SAVE - EVERY  # the last checkpoint before the fault


@pytest.fixture
def three() -> Iterator[Machines]:
    yield from machines_or_skip(3)


@pytest.fixture
def two() -> Iterator[Machines]:
    yield from machines_or_skip(2)


def machines_or_skip(num: int) -> Iterator[Machines]:
    try:
        with made(num) as machines:
            yield machines
    except CannotMake as why:
        pytest.skip(f"SEVERAL MACHINES ARE NOT TESTED HERE: {why}")
    assert not machines.left()


def strike(fault: str, machines: Machines, machine: int, job: Job) -> None:
    if fault in ("cut", "power"):
        machines.cut(machine)
    if fault in ("kill", "power"):
        job.send(signal.SIGKILL, job.ranks_on(machine))
    if fault == "stop":
        job.send(signal.SIGSTOP, job.ranks_on(machine))


def check(
    fault: str, machines: Machines, num: int, ranks: int, struck: int, moment: Moment, tmp: Path
) -> None:
    """Strike one of `num` machines with so many ranks each, and go on without it."""
    root, on = tmp / "checkpoints", list(range(num))
    job = Job(machines, tmp / "job", root, on, ranks, moment, LIMIT)
    try:
        job.await_gate()
        strike(fault, machines, struck, job)
        struck_at = time.monotonic()
        job.open_gate()
        lost = set(job.ranks_on(struck))
        live = [rank for rank in job.pids if fault == "cut" or rank not in lost]
        ended = job.await_end(live, LIMIT + SOON + 1.0)
        assert sorted(ended) == live, f"no error on {set(live) - set(ended)}; {job.notes()}"
        for rank, end in ended.items():
            seconds = end.at - struck_at
            print(f"{fault} m{struck} in a {moment}: rank {rank} after {seconds:.1f} s: {end.text}")
            assert end.error == "LostPeerError", end
            assert seconds < (0.0 if fault == "kill" else LIMIT) + SOON, (seconds, end)
            assert end.text.startswith("lost peer in ") and "The last collectives of" in end.text
            # By a roll call, or by where the store is served
            others = [f"m{m}" for m in on if m != struck] if rank in lost else [f"m{struck}"]
            assert any(f"on {host}" in end.text.split("\n")[0] for host in others), end
            assert job.codes[rank] == 1
    finally:
        job.kill()
    # All of a step or nothing
    assert checkpoint.verify(root) in ({LATEST: []}, {LATEST: [], GATE_SAVE: []})
    first = checkpoint.latest(root)
    assert first == LATEST or moment == "save"
    machines.mend(struck)
    rest = [machine for machine in on if machine != struck]
    more = Job(machines, tmp / "resumed", root, rest, ranks, None, LIMIT)
    try:
        ended = more.await_end(list(more.pids), 60.0)
        assert [(end.error, end.first_step) for end in ended.values()] == [("", first)] * (
            ranks * len(rest)
        ), more.notes()
    finally:
        more.kill()
    assert set(more.codes.values()) == {0}
    assert not leftovers(root)
    check_params(more.final())


def check_params(found: list[torch.Tensor]) -> None:
    """They moved as in one process."""
    step, params, buffers = training()
    state = step.init(params, buffers)
    first = [leaf.detach().clone() for leaf in tree_leaves(state.params)]
    for number in range(STEPS):
        state, _ = step(state, batch(number))
    for before, expected, got in zip(first, tree_leaves(state.params), found, strict=True):
        update = expected.detach() - before
        assert update.abs().max() > 1e-3
        torch.testing.assert_close(got - before, update, rtol=1e-9, atol=1e-12)


def test_machines_have_names_and_cables(two: Machines) -> None:
    def reaches() -> bool:
        """Whether m0, as its own name says, hears from m1 that nobody listens there."""
        pid = os.fork()
        if not pid:
            two.enter(0)
            try:
                socket.create_connection((two.address(1), 9), timeout=1.0)
            except ConnectionRefusedError:
                os._exit(3 if socket.gethostname() == "m0" else 1)
            except OSError:
                pass
            os._exit(2)
        return {3: True, 2: False}[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]

    assert len(two.left()) == 3
    assert reaches()
    two.cut(1)
    assert not reaches()
    two.mend(1)
    assert reaches()


def test_a_rank_fails_while_the_store_is_cut_off(three: Machines, tmp_path: Path) -> None:
    """It can tell nobody why. Its connections close, and its own error is its own."""
    job = Job(three, tmp_path / "job", tmp_path / "checkpoints", [0, 1, 2], 1, "step", 60.0)
    try:
        job.await_gate()
        three.cut(0)
        job.let_raise(1)
        begin = time.monotonic()
        job.open_gate()
        ended = job.await_end([1, 2], 2 * SOON)
    finally:
        job.kill()
    assert [(end.error, end.at - begin < SOON) for end in ended.values()] == [
        ("ValueError", True),
        ("LostPeerError", True),
    ], job.notes()
    assert ended[1].text == "bad batch"
    assert "It is served on the machine of rank 0 on m0" in ended[2].text


@pytest.mark.parametrize("moment", ["step", "save"])
@pytest.mark.parametrize("struck", [0, 1, 2])
@pytest.mark.parametrize("fault", ["cut", "stop", "kill", "power"])
def test_one_of_three_machines(
    fault: str, struck: int, moment: Moment, three: Machines, tmp_path: Path
) -> None:
    check(fault, three, 3, 1, struck, moment, tmp_path)


@pytest.mark.parametrize("struck", [0, 1])
@pytest.mark.parametrize("fault", ["cut", "kill"])
def test_one_of_two_machines_with_two_ranks_each(
    fault: str, struck: int, two: Machines, tmp_path: Path
) -> None:
    check(fault, two, 2, 2, struck, "step", tmp_path)
