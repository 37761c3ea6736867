"""The package as its users meet it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def in_a_fresh_process(code: str, folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_type_checkers_find_an_editable_install(tmp_path: Path) -> None:
    """They follow paths and run no import hooks. If this fails in an old environment, install once more."""
    finds = "from importlib.machinery import PathFinder; print(PathFinder.find_spec('functorch_zero').origin)"
    assert in_a_fresh_process(finds, tmp_path) == str(ROOT / "functorch_zero" / "__init__.py")
