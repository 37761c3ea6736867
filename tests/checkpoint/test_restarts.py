"""Runs that are restarted end as if nothing had been (E1, E2), and nothing is left over."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from functorch_zero import checkpoint
from functorch_zero.groups import launch
from tests.checkpoints import leftovers
from tests.tiers import THOROUGH, tiers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "resume.py"
RUN_LIMIT = 90.0  # seconds
RUN = ("--steps", "12", "--every", "3", "--at", "7")
SAVED: dict[int, list[str]] = {3: [], 6: [], 9: [], 12: []}  # all intact


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resume", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(root: Path, *more: str) -> argparse.Namespace:
    args: argparse.Namespace = (
        example().make_parser().parse_args(["--root", str(root), "--timeout", "4", *RUN, *more])
    )
    return args


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digest of the final state by level."""
    import torch._dynamo  # noqa: F401  # once, not in every forked rank: that takes three seconds

    folder = tmp_path_factory.mktemp("undisturbed")
    train = example().train
    return {
        level: launch(
            train,
            2,
            options(folder / str(level), "--level", str(level)),
            start_method="fork",
            timeout=60,
        )[0]
        for level in (1, 3)
    }


@pytest.mark.parametrize(
    ("level", "fault"),
    tiers(
        thorough=[
            (3, "kill"),
            (1, "raise inside"),
            (3, "hang"),
            (1, "raise"),
            (1, "kill inside"),
            (3, "raise inside"),
        ],
        rows=True,
    ),
)
def test_a_run_that_is_restarted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[int, str],
    level: int,
    fault: str,
) -> None:
    """E1, with this test in the agent's place: what torchrun does, in a second."""
    kind, _, where = fault.partition(" ")
    more = ["--level", str(level), "--fault", kind, *(["--inside-save"] if where else [])]
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        try:
            ended = launch(
                example().train, 2, options(tmp_path, *more), start_method="fork", timeout=60
            )
        except Exception:
            assert attempt == 0 and checkpoint.latest(tmp_path) == 6
            continue
        assert attempt == 1
        assert ended == [undisturbed[level]] * 2
    assert checkpoint.verify(tmp_path) == SAVED
    assert not leftovers(tmp_path)


def torchrun(*command: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *command]


ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@THOROUGH
def test_under_torchrun(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """E1. Killed inside a save."""
    command = torchrun(
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "--monitor-interval",
        "0.1",
        str(SCRIPT),
        "--root",
        str(tmp_path),
        *RUN,
        "--fault",
        "kill",
        "--inside-save",
    )
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_LIMIT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.findall(r"attempt (\d+): 2 ranks from step (\d+)", done.stdout) == [
        ("0", "0"),
        ("1", "6"),
    ]
    assert f"digest {undisturbed[3]}" in done.stdout
    assert checkpoint.verify(tmp_path) == SAVED and not leftovers(tmp_path)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@THOROUGH
def test_two_agents_shrink_to_one(tmp_path: Path) -> None:
    """E2. An agent is killed; its rank goes with it, and the other agent's resumes alone."""
    root, logs = tmp_path / "root", [tmp_path / "0", tmp_path / "1"]
    config = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2,join_timeout=60"
    command = torchrun(
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "5",
        "--monitor-interval",
        "0.1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-id",
        "shrink",
        "--rdzv-conf",
        config,
        "--local-addr",
        "127.0.0.1",
        str(SCRIPT),
        "--root",
        str(root),
        "--steps",
        "60",
        "--pause",
        "0.1",
    )
    agents = []
    try:
        for log in logs:
            with log.open("w") as out:
                agents.append(
                    subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT)
                )
            time.sleep(1.0)  # the first one is host
        give_up = time.monotonic() + RUN_LIMIT
        while not (root.exists() and checkpoint.latest(root)) and time.monotonic() < give_up:
            time.sleep(0.05)
        agents[1].send_signal(signal.SIGKILL)
        agents[0].wait(RUN_LIMIT)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
    said = logs[0].read_text()
    attempts = re.findall(r"attempt \d+: (\d) ranks from step (\d+)", said + logs[1].read_text())
    assert agents[0].returncode == 0, said[-4000:]
    assert attempts[0] == ("2", "0") and attempts[-1][0] == "1" and int(attempts[-1][1]) >= 10, (
        attempts
    )
    assert "step 60 digest" in said and checkpoint.latest(root) == 60
