"""Scripts run to their end: as a user would start them, or in a fork of this process, which has
imported all."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo

# with sympy; all of this once, not in every fork: that takes seconds
import torch.fx.experimental.symbolic_shapes

import functorch_zero  # noqa: F401

ROOT = Path(__file__).parents[1]
TIMEOUT = 100  # seconds a script


class Ended(NamedTuple):
    """How a script ended."""

    returncode: int | None  # None: it was killed after TIMEOUT
    stdout: str
    stderr: str

    def check(self) -> str:
        """Its output, if it has ended well."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self.stdout


def run_command(*command: str, folder: Path | None = None) -> Ended:
    """In a new process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    return Ended(made.returncode, made.stdout, made.stderr)


def run_script(path: Path, *options: str, folder: Path | None = None) -> Ended:
    """By `python -W error`."""
    return run_command(sys.executable, "-W", "error", str(path), *options, folder=folder)


def run_in_fork(path: Path, *options: str, folder: Path) -> Ended:
    """The same at a tenth of the cost, since neither the script nor the ranks that it launches
    import torch again."""
    if "compile" in path.read_text():
        torch._dynamo.list_backends()  # imports inductor
    out, errors = folder / "stdout.txt", folder / "stderr.txt"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(path, options, folder, out, errors), daemon=False)
    process.start()
    process.join(TIMEOUT)
    in_time = not process.is_alive()
    if not in_time:
        process.kill()
        process.join()
    code = process.exitcode if in_time else None
    process.close()
    return Ended(code, out.read_text(), errors.read_text())


def _run(path: Path, options: tuple[str, ...], folder: Path, out: Path, errors: Path) -> None:
    """What a fork does: what Python would do with this script, and its ranks are forked, too."""
    os.chdir(folder)
    sys.stdout, sys.stderr = out.open("w", buffering=1), errors.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    warnings.resetwarnings()
    warnings.simplefilter("error")
    # Jax's, where it was imported
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    sys.argv, sys.path[0:0] = [str(path), *options], [str(path.parent)]
    torch.manual_seed(0)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
