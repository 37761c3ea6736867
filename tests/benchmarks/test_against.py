"""The comparison of two versions: it runs, both of a wheel and of a checkout, and each side gets
its own version."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import THOROUGH

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "against.py"
SPREAD = r"(\S+) \((\S+)-(\S+)\)"
ROW = rf"^\| fz_level3 \| {SPREAD} \| {SPREAD} \| \S+ \| \S+ \| (\S+) \|$"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280
    )


def wheel_of(folder: Path, source: str | None = None) -> Path:
    """This checkout's package as a wheel has it; `source`: an `__init__.py` instead."""
    path = folder / "functorch_zero-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        if source is not None:
            wheel.writestr("functorch_zero/__init__.py", source)
        else:
            for file in sorted((ROOT / "functorch_zero").rglob("*.py")):
                wheel.write(file, file.relative_to(ROOT))
    return path


@pytest.fixture(scope="module")
def module() -> Any:
    spec = importlib.util.spec_from_file_location("against", SCRIPT)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@THOROUGH
@pytest.mark.timeout(300)  # four processes import torch, on machines that others use, too
def test_a_wheel_against_a_checkout(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path)
    done = run(
        str(wheel),
        str(ROOT),
        "--size",
        "tiny",
        "--rounds",
        "2",
        "--steps",
        "1",
        "--only",
        "fz_level3",
    )
    assert done.returncode == 0, done.stderr
    assert f"old: {wheel.name}, new: " in done.stdout and "--rounds 2" in done.stdout
    found = re.search(ROW, done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    *ratios, apart = map(float, found.groups())
    for middle, low, high in (ratios[:3], ratios[3:]):
        assert 0 < low <= middle <= high
    assert apart == 0, "one code, one result"


@THOROUGH
@pytest.mark.timeout(300)  # four processes import torch, on machines that others use, too
def test_a_side_that_fails_is_reported(tmp_path: Path) -> None:
    """Its own words are shown: so it is that version that was imported."""
    wheel = wheel_of(tmp_path, "raise RuntimeError('a version that does not work')")
    done = run(str(ROOT), str(wheel), "--size", "tiny", "--rounds", "1", "--only", "fz_alone")
    assert done.returncode == 1
    assert "a version that does not work" in done.stderr and re.search(
        r"rank \d ended", done.stderr
    )


def test_what_is_no_version_is_refused(tmp_path: Path) -> None:
    done = run(str(ROOT), str(tmp_path))
    assert (
        done.returncode == 1
        and "NEW must be a checkout or a wheel of functorch_zero" in done.stderr
    )
    done = run(str(ROOT), str(ROOT), "--only", "fz_level7")
    assert done.returncode == 1 and "--only takes some of fz_level0" in done.stderr


def test_names_of_either_version(module: Any) -> None:
    old, new = types.ModuleType("old"), types.ModuleType("new")
    old.Solo, old.groups, old.__file__ = 1, types.ModuleType("groups"), "here"  # type: ignore[attr-defined]
    new.groups = types.SimpleNamespace(SingleRank=2)  # type: ignore[attr-defined]
    assert module.named(old, "groups.SingleRank") == 1
    assert module.named(new, "groups.SingleRank") == 2
    with pytest.raises(AttributeError, match="here has no shard"):
        module.named(old, "shard")


def test_quartiles(module: Any) -> None:
    assert module.spread([1.0]) == "1.000 (1.000-1.000)"
    assert module.spread([3.0, 1.0, 2.0]) == "2.000 (1.500-2.500)"
