"""Drawn programs: the plain torch loop, the unsharded step and the sharded step agree, or an error
says why not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from functorch_zero import optim
from tests.fuzz import optimizers
from tests.fuzz.cases import AXES, REFUSED, Case, draw
from tests.fuzz.known import KNOWN, shows, without_known
from tests.fuzz.models import BLOCKS
from tests.fuzz.optimizers import TABLED, TWINS, Twins
from tests.fuzz.run import DEFECTS, drawn, outcome, shrink
from tests.tiers import thinned, tiers

SEEDS_PER_TEST = 5
QUICK, CUT, COVERING, THOROUGH = 5, 20, 60, 300  # seeds up to these

# Programs that once showed a defect, or that are refused for a good reason, with their outcomes
KEPT = {
    Case(0, ("experts",), units="linears", level=2): ("REFUSED", "use different units"),
    Case(30, ("by the data",), units="linears", level=2, ranks=3): ("REFUSED", "layer be the unit"),
    Case(30, ("by the data",), units="nested", level="mixed", ranks=3): (
        "REFUSED",
        "use different units",
    ),
    Case(0, ("experts",), units="linears", level=1, ranks=3): ("EQUAL", ""),
    Case(0, ("by the data",), units="blocks", level=3, ranks=3): ("EQUAL", ""),
    Case(0, ("writes leaf",)): ("REFUSED", "a leaf of params was changed in place"),
    Case(0, loss="writes leaf", level=3): ("REFUSED", "a leaf of params was changed in place"),
    Case(0, loss="leaf gradient", level=3): ("REFUSED", "fz.unshard(params)"),
    Case(0, loss="func.jvp", level=3): ("REFUSED", "thread ranks can't take turns"),
    Case(0, loss="func.jvp", level=3, ranks=1): ("EQUAL", ""),
    Case(0, ("counter",), rows="empty", sync_buffers="rank0"): ("EQUAL", ""),
    # Silent once
    Case(8, loss="function outside"): ("EQUAL", ""),
    Case(4, loss="adversarial"): ("EQUAL", ""),
    Case(0, ("batch norm",), "writes buffers"): ("EQUAL", ""),
    Case(0, ("complex buffer",)): ("EQUAL", ""),
    Case(49, ("writes leaf data",)): ("REFUSED", "a leaf of params was changed in place"),
    Case(0, loss="writes leaf data"): ("REFUSED", "a leaf of params was changed in place"),
    Case(5, ("in tuple",)): ("REFUSED", "by another reference"),
    Case(51, ("in dict",)): ("EQUAL", ""),
    Case(1, ("in dataclass",)): ("EQUAL", ""),
    Case(21, ("leaf hook",)): ("REFUSED", "params have hooks"),
    Case(0, ("buffer is leaf",)): ("REFUSED", "shares elements with another leaf"),
    Case(0, rows="uneven", weight_of_row=0.1): ("EQUAL", ""),
    Case(0, ("complex",), optimizer="adam"): ("EQUAL", ""),
    Case(0, ("complex",), optimizer="amsgrad"): ("EQUAL", ""),
}


@pytest.mark.parametrize(
    "first",
    tiers(range(0, QUICK, SEEDS_PER_TEST), range(QUICK, THOROUGH, SEEDS_PER_TEST)),
)
def test_drawn_programs_agree_or_are_refused(first: int, request: pytest.FixtureRequest) -> None:
    """The first ones have small leaves cut, too; the others have the layouts of real runs."""
    if first < CUT:
        request.getfixturevalue("cut_anywhere")
    failed = []
    for seed in range(first, first + SEEDS_PER_TEST):
        case, found = drawn(seed)
        if found.kind in DEFECTS:
            failed.append(f"{found.kind} {case!r}: {found.reason}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(
    ("case", "kind", "reason"), thinned([(c, *KEPT[c]) for c in KEPT], rows=True)
)
def test_kept_programs(case: Case, kind: str, reason: str) -> None:
    found = outcome(case)
    assert found.kind == kind and reason in found.reason, found


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a known defect")
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_defect_is_mended(name: str) -> None:
    """When one is, its entry in KNOWN goes, and drawn cases have it again."""
    assert outcome(KNOWN[name].case).kind not in DEFECTS


@pytest.mark.parametrize("name", KNOWN)
def test_drawn_programs_go_without_known_defects(name: str) -> None:
    known = KNOWN[name]
    assert shows(known.case, known)
    assert not shows(without_known(known.case), known)


# The fuzzer itself


@functools.cache
def first_cases() -> list[Case]:
    return [draw(seed) for seed in range(COVERING)]


@pytest.mark.parametrize("axis", [*AXES, "blocks", "optimizer"])
def test_the_first_seeds_cover_all_values(axis: str) -> None:
    found: set[Any] = set()
    for case in first_cases():
        value = getattr(case, axis)
        found.update(value if axis == "blocks" else [value])
    blocks = {*BLOCKS} - REFUSED
    wanted = {"blocks": blocks, "optimizer": {*TWINS}}.get(axis) or {*AXES[axis]}
    assert wanted <= found
    assert axis != "optimizer" or len(found & {*TABLED}) >= 30


def test_a_case_is_its_seeds_and_its_repr_makes_it() -> None:
    cases = [draw(seed) for seed in range(20)]
    assert cases == [draw(seed) for seed in range(20)]
    assert cases == [eval(repr(case)) for case in cases]


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-6])
def test_another_learning_rate_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    wrong = Twins(lambda: optim.sgd(0.05), lambda p: torch.optim.SGD(p, 0.05 * factor))
    monkeypatch.setitem(optimizers.TWINS, "sgd", wrong)
    assert outcome(Case(0)).kind == ("EQUAL" if factor == 1 else "SILENT")


def test_a_failing_case_is_made_plain() -> None:
    case = Case(3, ("tied", "twice", "scalar"), "metrics", "adam", level=3, ranks=4, donate=False)
    plain = shrink(case, lambda case: "twice" in case.blocks and case.level == 3)
    assert plain == Case(3, ("twice",), level=3)
