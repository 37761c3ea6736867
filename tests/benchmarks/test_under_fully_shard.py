"""The table of optimizers under `fully_shard`: right ones are right, and wrong ones are told from
crashes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from functorch_zero.groups import launch
from tests.benchmarks import under_fully_shard as script
from tests.tiers import FULL, THOROUGH

ROOT = Path(__file__).parents[2]


class OwnNorms:
    """SGD by gradients divided by their norms, each of what a rank holds."""

    def __init__(self, model: nn.Module):
        self.params = [*model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            here = [getattr(x, "_local_tensor", x) for x in (param, param.grad)]
            here[0].sub_(here[1] / (here[1].norm() + 1e-8))

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def crashing(model: nn.Module) -> list[Any]:
    if torch.distributed.get_world_size() > 1:
        raise RuntimeError("no | strategy\nfor this")
    return [torch.optim.SGD(model.parameters(), lr=1e-2)]


@THOROUGH
def test_wrong_ones_and_crashes_are_told() -> None:
    wrong = script.Candidate("torch", "own norms", lambda model: [OwnNorms(model)], "own norms")
    row = script.tried(wrong, [2], 60)
    assert not row.is_right and re.fullmatch(r"\*\*off by \de[-+]\d\d\*\*", row.cells[0])
    crash = script.tried(script.Candidate("torch", "crashing", crashing), [2], 60)
    assert crash.cells == ["RuntimeError: no / strategy"] * 2 and not crash.is_right


def sum_as_number() -> float:
    mesh = init_device_mesh("cpu", (2,))
    return float(distribute_tensor(torch.arange(1.0, 9.0), mesh, [Shard(0)]).sum().item())


@THOROUGH
def test_the_number_of_a_partial_sum_is_of_a_rank_alone() -> None:
    """The page says so, and that no warning is given."""
    assert launch(sum_as_number, 2, start_method="fork", timeout=60) == [10, 26]


@FULL
@pytest.mark.timeout(600)
def test_torchs_own_and_ours(tmp_path: Path) -> None:
    """As a user runs it: the table stands between the page's markers, and ours are right."""
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{script.BEGIN}\n\nold\n\n{script.END}\n\nBehind.\n")
    command = [sys.executable, str(ROOT / "tests/benchmarks/under_fully_shard.py")]
    command += ["--packages", "torch,functorch_zero", "--ranks", "2", "--write", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("Behind.\n") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| functorch_zero")]
    assert len(rows) == len(script.OURS)
    for row in [*rows, *re.findall(r"\| torch .* \| AdamW \|.*", text)]:
        assert row.split("|")[3].strip().startswith("right ("), row
