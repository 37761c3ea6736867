"""Names that a benchmark doesn't know are refused before anything runs, with those it knows."""

from __future__ import annotations

import importlib
import re
import sys

import pytest


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("peers", "--only fz_level3,fsdp", "fully_shard, fully_shard_keep.*got fsdp$"),
        ("optimizers", "--optimizers lamb,adam", "lamb, lamb_floats, adafactor.*got adam$"),
        ("optimizers", "--only zero,alone", "fz_level1, zero.*got alone$"),
        ("compression", "--tables params,ddp", "gradients, pieces, params.*got ddp$"),
    ],
)
def test_unknown_names_are_refused(
    script: str,
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(f"tests.benchmarks.{script}")
    monkeypatch.setattr(sys, "argv", [script, *words.split()])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"{script}: error: argument {words.split()[0]}: takes some of")
    assert re.search(message, lines[-1])
