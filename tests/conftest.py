"""What every test runs under: one torch thread, repeatable Hypothesis cases, and nothing left
running."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import HealthCheck, settings

from functorch_zero._torch_private import can_compile
from functorch_zero.optim.claims.check import check_claims
from functorch_zero.optim.naming import described
from functorch_zero.sharded.options import Options

torch.set_num_threads(1)

settings.register_profile(  # numbers of examples are in tests/tiers.py
    "tests",
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

NOT_TESTED = "NOT TESTED HERE"  # in the reasons of skips to be told at the end
GRACE = 5.0  # seconds that a test's threads and processes have to end
# The interpreter's own helpers
KEPT = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for tests in test files only: doctests are the package's, and helpers here may import
    what warns."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith(
        ("test_", "conftest", "__init__")
    )
    return True if helper else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that has marks of two tiers, from two tables, is in the later one alone. Tests that
    compute with jax come last: it starts threads, and ranks that are forked afterwards might
    hang."""
    for item in items:
        if item.get_closest_marker("full"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "thorough"]
    items.sort(key=uses_jax)


@pytest.hookimpl(optionalhook=True)  # there is no such hook under `-p no:xdist`
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker more than cores, since tests that wait for processes leave a core
    idle."""
    return len(cores()) + 1


def pytest_configure() -> None:
    """Keep a worker on one core: ranks that are threads run in turns, and a turn's first
    instructions take three times as long on another core. Forked ranks use all of them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")  # such as gw1
    if worker is not None and sys.platform == "linux":
        every = cores()
        os.sched_setaffinity(0, {every[int(worker.removeprefix("gw")) % len(every)]})
        os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, every))


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pytest_collection_finish() -> None:
    """Take what is imported by now out of the collector's sight: every collection would walk it,
    and in a forked rank copy its pages."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say aloud what this machine can't test, where a skip would be one of many."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = {report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)}
    for reason in sorted(reasons):
        if NOT_TESTED in reason:
            terminalreporter.write_line(reason.removeprefix("Skipped: "), red=True, bold=True)


def uses_jax(item: pytest.Item) -> bool:
    """Whether a test, or its module, has jax under that name."""
    if not isinstance(item, pytest.Function):
        return False
    code = item.function.__code__
    return hasattr(item.module, "jax") or "jax" in (*code.co_varnames, *code.co_cellvars)


def children() -> dict[int, str]:
    """This process's children that are still running: pid -> command line. Empty where there is no
    /proc."""
    found = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # that thread has ended
            continue
        for pid in pids:
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z" and not any(helper in command for helper in KEPT):
                found[int(pid)] = command.strip()
    return found


def leftovers(threads: set[threading.Thread], processes: set[int]) -> list[str]:
    """What runs now and is not among these."""
    running = [t.name for t in threading.enumerate() if t not in threads]
    # One that torch.fx starts for its bars of progress
    new = [f"thread {name}" for name in running if name != "tqdm_monitor"]
    return new + [
        f"process {pid}: {command}" for pid, command in children().items() if pid not in processes
    ]


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail a test that leaves a thread or a child process behind."""
    threads, processes = set(threading.enumerate()), set(children())
    yield
    end = time.monotonic() + GRACE
    while (left := leftovers(threads, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, f"still running {GRACE:.0f} s after the test: {left}"


@pytest.fixture
def cpp_compiler() -> None:
    """Skip a test where inductor finds no compiler. Asking imports inductor, which takes seconds:
    so not in a mark, which every worker evaluates at collection."""
    if not can_compile("cpu"):
        pytest.skip("needs a C++ compiler")


Claims = dict[str, set[Any]]  # a transform -> the kinds of leaves that it was checked on
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def checked_claims() -> Claims:
    """Claims of the package's own functions that have been checked in this session."""
    return {}


@pytest.fixture(autouse=True)
def claims_checked_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, checked_claims: Claims
) -> None:
    """Let `shard` check like claims once: those of the package once per session, and only in the
    tests about them, which have all optimizers; others, on equal trees, once per test.

    It checks them at each `init` on each rank, which would be most of its time here. The rows of
    the conformance table have theirs checked in the thorough and the full tier.
    """
    about_ours = HERE / "optim" in request.path.parents or (
        HERE / "conformance" in request.path.parents and not is_quick(request.node)
    )
    checked_in_this_test: Claims = {}

    def check(transform: Any, params: Any) -> None:
        description = described(transform)
        leaves, structure = optree.tree_flatten(params)
        if not names_only_ours(description):
            checked = checked_in_this_test.setdefault(str(description), set())
            kinds = {(structure, *((x.shape, x.dtype) for x in leaves))}
        elif about_ours:
            checked = checked_claims.setdefault(str(description), set())
            kinds = {(min(x.dim(), 2), x.is_complex()) for x in leaves}
        else:
            return
        if not kinds <= checked:
            check_claims(transform, params)
            checked |= kinds

    for module in ("program.engine", "to_torch"):
        sharded = importlib.import_module(f"functorch_zero.sharded.{module}")
        monkeypatch.setattr(sharded, "check_claims", check)


@pytest.fixture
def cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `shard` cut small leaves, too, as it does in proofs: aligned ones lie whole on a rank."""
    checked = Options.checked

    def unaligned(*args: Any, **settings: Any) -> Options:
        return replace(checked(*args, **settings), aligned=False)

    monkeypatch.setattr(Options, "checked", unaligned)


def is_quick(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(tier) for tier in ("thorough", "full"))


def names_only_ours(description: Any) -> bool:
    """Whether all factories and functions that a description names are the package's, whose bodies
    don't change: those of others have dotted names."""
    if isinstance(description, list):
        return all(names_only_ours(part) for part in description)
    if isinstance(description, dict):
        return all(
            ("." not in name or name.startswith("functorch_zero.")) and names_only_ours(value)
            for name, value in description.items()
        )
    return True
