"""`python -m functorch_zero doctor`: what it finds, and that each finding can be a bad one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from functorch_zero.__main__ import main
from functorch_zero.groups import doctor, run_ranks
from functorch_zero.groups.doctor import Finding
from tests.tiers import THOROUGH


def test_the_results_of_collectives() -> None:
    assert run_ranks(doctor.results, 2)[0] == {
        "all_gather": [0, 1, 2, 3, 100, 101, 102, 103],
        "reduce_scatter": [100, 102],
        "all_reduce": [100, 102, 104, 106, 100, 101, 102, 103],
        "all_to_all": [0, 1, 100, 101],
        "broadcast": [100, 101, 102, 103],
        "exchange": [b"x", b"xx"],
    }


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_collective_that_does_nothing_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functorch_zero.groups import Done, ThreadGroup

    right = run_ranks(doctor.results, 2)
    assert doctor.wrong_collectives(right, right) == []
    monkeypatch.setattr(ThreadGroup, name, lambda self, *args: Done())
    assert doctor.wrong_collectives(run_ranks(doctor.results, 2), right) == [name]


def fails() -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise OSError("no such file")

    return call


def found(num_open: int, **wrong: Any) -> list[tuple[dict[str, Any], int, int]]:
    """Of two ranks with a limit of 99 files."""
    right = run_ranks(doctor.results, 2)
    return [(right[0], num_open, 99), (right[1] | wrong, num_open, 99)]


@pytest.mark.parametrize(
    "changes, look, verdict, text",
    [
        ([(dist, "is_gloo_available", lambda: False)], doctor.backends, "error", "no gloo"),
        ([(torch.cuda, "is_available", lambda: True), (dist, "is_nccl_available", lambda: False)],
         doctor.backends, "warning", "no nccl"),
        ([(torch.cuda, "device_count", lambda: 1), (torch.cuda, "get_device_name", str)],
         lambda: doctor.devices(2), "warning", "for 2 ranks"),
        ([(doctor, "_SHARED_MEMORY", "/none")], doctor.shared_memory, "warning", "0 MiB free"),
        ([(doctor, "_LEAST_SHARED", 1 << 60)], doctor.shared_memory, "warning", "MiB free"),
        ([(doctor.socket, "gethostname", lambda: "no-host.invalid")], doctor.interfaces,
         "warning", "resolves to nothing"),
        ([(doctor.platform, "system", lambda: "Other")], doctor.versions, "warning", "torch"),
        ([(doctor, "launch", fails())], lambda: doctor.collectives(2)[0], "error", "no such file"),
        ([(doctor, "launch", lambda *a, **k: found(broadcast=[0.0], num_open=9))],
         lambda: doctor.collectives(2)[0], "error", "wrong results of broadcast"),
        ([(doctor, "launch", lambda *a, **k: found(num_open=90))],
         lambda: doctor.collectives(2)[1], "warning", "the limit is 99"),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_with_a_remedy(
    changes: Any, look: Any, verdict: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for where, name, value in changes:
        monkeypatch.setattr(where, name, value)
    found: Finding = look()
    assert found.verdict == verdict and text in found.found and found.remedy


def test_settings_of_the_environment_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope")
    assert doctor.interfaces().verdict == "error"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor.interfaces().verdict == "ok"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert doctor.threads(2).verdict == "warning"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert doctor.threads(1).verdict == "ok"


def test_an_error_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "launch", fails())
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found[-1]["verdict"] == "error" and found[-1]["remedy"]
    assert main(["doctor", "--ranks", "0"]) == 2


@THOROUGH
def test_real_ranks_are_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "ok       collectives of 2 ranks over gloo: all_gather" in printed
    assert "open files" in printed
