"""What is measured of a step: which calls of it, and which events of a profile."""

from __future__ import annotations

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from functorch_zero.model.untouched import is_looked_at
from tests.gpu.measure import FEW, MANY, looked_at_ms, of_update, times, usual_steps, warm_up


@pytest.mark.parametrize(("count", "first"), [(2, 5), (sum(FEW) + 1, 9), (sum(MANY) + 1, 17)])
def test_no_timed_step_is_looked_at(count: int, first: int) -> None:
    assert usual_steps(4, count) == first
    assert not any(is_looked_at(n) for n in range(first, first + count))


def test_the_calls_of_a_run() -> None:
    """Those before the timed ones, these, and up to one that is looked at."""
    calls: list[str] = []
    number = warm_up(lambda: calls.append("warm"), sum(FEW))
    found = times(lambda: calls.append("timed"), FEW)
    assert calls == ["warm"] * 9 + ["timed"] * 5
    assert found["step ms"] >= 0 and found["host ms"] >= 0
    looked_at_ms(lambda: calls.append("looked"), number + 5)
    assert calls[14:] == ["looked"] * 2 and not is_looked_at(14) and is_looked_at(15)


def event(name: str, start: float, end: float, kind: DeviceType, **named: bool) -> FunctionEvent:
    return FunctionEvent(0, name, 0, start, end, device_type=kind, **named)


def test_an_update_is_all_of_its_kernels() -> None:
    """On every stream: each has a range of its own, and that of a stream for collectives may come
    last, and be short."""
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("fz.update", 100, 200, cpu, is_user_annotation=True),
        event("aten::mul", 110, 120, cpu),
        event("cudaLaunchKernel", 112, 114, cpu),
        event("cuLaunchKernel", 130, 134, cpu),
        event("aten::mul", 210, 220, cpu),  # after it
        event("backward's", 90, 150, gpu),
        event("fz.update", 150, 450, gpu, is_user_annotation=True),
        event("norm", 150, 250, gpu),
        event("adamw", 350, 450, gpu),
        event("fz.update", 260, 261, gpu, is_user_annotation=True),
        event("copy of the wire", 260, 261, gpu),
        event("publish's", 451, 500, gpu),
    ]
    found = of_update(events)
    assert found == {"device ms": 0.201, "host ms": 0.1, "launches": 2, "operators": 1}
