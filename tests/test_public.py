"""The package as its users meet it: the names that it shows, and that type checkers find it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import functorch_zero as fz
from tests.test_docs import blocks
from tests.tiers import FULL, THOROUGH

ROOT = Path(__file__).parents[1]


def in_a_fresh_process(code: str, folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_dir_shows_the_public_names() -> None:
    assert dir(fz) == sorted([*fz.__all__, "__version__"])
    assert {"shard", "plan", "checkpoint", "testing"} <= set(dir(fz))


@THOROUGH
def test_every_name_that_dir_shows_is_there(tmp_path: Path) -> None:
    """In a new process, where nothing has imported the lazy ones before."""
    code = (
        "import functorch_zero as fz; print([name for name in dir(fz) if getattr(fz, name, "
        "None) is None])"
    )
    assert in_a_fresh_process(code, tmp_path) == "[]"


def test_the_version_is_that_of_the_installed_package() -> None:
    assert fz.__version__ == importlib.metadata.version("functorch-zero")


def test_type_checkers_find_an_editable_install(tmp_path: Path) -> None:
    """They follow paths and run no import hooks. If this fails in an old environment, install once
    more."""
    finds = (
        "from importlib.machinery import PathFinder; "
        "print(PathFinder.find_spec('functorch_zero').origin)"
    )
    assert in_a_fresh_process(finds, tmp_path) == str(ROOT / "functorch_zero" / "__init__.py")


def test_a_name_of_the_long_tail_is_found_by_its_error() -> None:
    assert fz.optim.contrib.yogi(0.1).needs is fz.optim.Needs.POINTWISE
    with pytest.raises(AttributeError, match=r"it is optim\.contrib\.yogi"):
        _ = fz.optim.yogi
    with pytest.raises(AttributeError, match=r"no attribute 'yoga'$"):
        _ = fz.optim.yoga


def test_all_errors_have_one_base_class() -> None:
    named = [getattr(fz.errors, name) for name in fz.errors.__all__]
    errors = [each for each in named if not issubclass(each, Warning)]
    assert {each.__name__ for each in named} - {each.__name__ for each in errors} == {
        "EqualBatchesWarning",
        "LostBuffersWarning",
        "UnequalBatchesWarning",
    }
    for error in (*errors, fz.checkpoint.CheckpointError, fz.checkpoint.CorruptError):
        assert issubclass(error, fz.errors.FunctorchZeroError)


@FULL
def test_the_readme_runs_on_a_built_wheel(tmp_path: Path) -> None:
    """Made from the sdist, which has all that git has; away from the repository. The tools to build
    it come from the package index."""
    tools, dist, installed = (tmp_path / name for name in ("tools", "dist", "installed"))

    def run(python: Path | str, *arguments: object, **env: str) -> str:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
        command = [str(python), *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    run(sys.executable, "-m", "venv", tools)
    python = tools / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "build", "twine")
    run(python, "-m", "build", "-o", dist, ROOT)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    run(python, "-m", "twine", "check", "--strict", sdist, wheel)
    listed = run("git", "-C", ROOT, "ls-files", "-z").split("\0")[:-1]
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in listed if name not in packed and (ROOT / name).exists()] == []
    names = zipfile.ZipFile(wheel).namelist()
    assert "functorch_zero/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"functorch_zero"}

    run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", installed, wheel)
    script = tmp_path / "script.py"
    script.write_text(blocks((ROOT / "README.md").read_text())[0])
    path = str(installed)
    found = run(
        sys.executable, "-c", "import functorch_zero as f; print(f.__file__)", PYTHONPATH=path
    )
    assert found.startswith(path)
    assert "loss " in run(sys.executable, "-W", "error", script, PYTHONPATH=path)
