"""A few seconds of the soak test, training whose memory stays flat, and launches that leave nothing
behind."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from functorch_zero import optim
from functorch_zero.groups import ProcessGroup, launch
from functorch_zero.sharded.api import shard
from functorch_zero.step.program import unshard
from functorch_zero.step.train import train_step
from tests import soak
from tests.tiers import FULL, THOROUGH, tiers


@pytest.mark.parametrize(
    ("seconds", "ranks", "level", "seed"),
    [
        pytest.param(1.0, 2, 3, 1, id="thorough", marks=THOROUGH),
        pytest.param(20.0, 3, 2, 2, id="full", marks=FULL),
        *(
            pytest.param(60.0, 2 + seed % 2, 3, seed, id=f"full-{seed}", marks=FULL)
            for seed in range(5)
        ),
    ],
)
def test_training_through_faults(seconds: float, ranks: int, level: int, seed: int) -> None:
    happened = soak.soak(seconds, ranks=ranks, level=level, seed=seed)
    assert happened["commits"] and happened["to the end"] == 1


def resident() -> float:
    """MiB of memory that this process has, without freed memory that glibc keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def held() -> list[float]:
    """MiB, tensors, objects, threads and descriptors that this process has.

    gloo's own thread may keep a collective's tensor for a moment after the collective has ended,
    so one count can be one too high: the least of several counts is the count.
    """
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(x), torch.Tensor) for x in objects)
    descriptors = len(os.listdir("/proc/self/fd"))
    return [resident(), tensors, len(objects), threading.active_count(), descriptors]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("first", "last"), tiers(thorough=[(200, 2000)], rows=True))
def test_memory_is_flat_over_many_steps(first: int, last: int) -> None:
    """No tensor, object, thread or descriptor more, and no memory beyond the allocator's noise."""

    def run() -> list[list[float]]:
        group = ProcessGroup(timeout=20)
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.001))
        step = shard(
            train_step(lambda p, b, x: (x @ unshard(p)["w"]).square().mean(), optimizer),
            level=3,
            group=group,
        )
        state, batch = step.init({"w": torch.ones(5, 3, requires_grad=True)}), torch.ones(4, 5)
        seen = []
        for end in (first, last):
            for _ in range(end - 10 - len(seen) * first):
                state, _ = step(state, batch)
            counts = []
            for _ in range(10):
                state, _ = step(state, batch)
                counts.append(held())
            seen.append([min(count) for count in zip(*counts, strict=True)])
        return seen

    for early, late in launch(run, 2, start_method="fork", timeout=100):
        assert late[0] - early[0] < 4.0, (early, late)
        assert late[1] <= early[1] and late[3] <= early[3] and late[4] <= early[4], (early, late)
        assert late[2] < early[2] + (last - first) / 4, (early, late)


SCRIPT = """
import os, signal, sys, time
import functorch_zero as fz

def rank(path):
    open(f"{path}/{os.getpid()}", "w").close()
    time.sleep(60)

if __name__ == "__main__":
    fz.launch(rank, 2, sys.argv[1], start_method="fork")
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the ranks meet in a temporary folder"
)
@pytest.mark.parametrize("number", tiers(thorough=[signal.SIGKILL, signal.SIGTERM]))
def test_a_launch_whose_parent_is_killed_leaves_nothing(tmp_path: Path, number: Any) -> None:
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(pids)], env=environment)
    give_up = time.monotonic() + 60
    while len(list(pids.iterdir())) < 2 and time.monotonic() < give_up:
        time.sleep(0.02)
    parent.send_signal(number)
    parent.wait(20)
    ranks = [int(path.name) for path in pids.iterdir()]
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not list(temporary.iterdir())
