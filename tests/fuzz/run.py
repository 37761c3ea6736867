"""A case in three runs, and its outcome.

`python -m tests.fuzz.run --seeds 0:200` prints a table of outcomes and their reasons;
`--seed 17 -v` shows one case; with `--shrink` failing cases are made as plain as they stay failing.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from functorch_zero.errors import FunctorchZeroError, GroupError
from functorch_zero.groups.threads import run_ranks
from tests.fuzz.cases import Case, draw
from tests.fuzz.known import without_known
from tests.fuzz.library import Sharded, Unsharded
from tests.fuzz.loop import Loop
from tests.fuzz.optimizers import TWINS
from tests.fuzz.runs import Named, Seen, drive

SECONDS = 30.0  # that ranks may take
LARGE = 100.0  # leaves begin near 1
DEFECTS = ("RAW", "SILENT")


class Outcome(NamedTuple):
    """How a case ended.

    Attributes:
        kind: EQUAL; REFUSED, by an error that says why; or a defect: RAW, by another error, or
            SILENT, with other results. INVALID: the plain loop raises.
        reason: by whom it was refused and why, or the first difference.
    """

    kind: str
    reason: str = ""
    trace: str = ""


def outcome(case: Case) -> Outcome:
    """Run a case by the plain loop, unsharded, and on ranks."""
    twin = case if case.optimizer in TWINS else replace(case, optimizer="sgd")
    try:
        expected = drive(Loop(twin), twin)
        _check_tame(expected)
    except Exception as error:
        return Outcome("INVALID", _first_line(error), traceback.format_exc())
    with tempfile.TemporaryDirectory() as root:
        try:
            by = "unsharded"
            if twin is not case:
                whole = drive(Unsharded(twin, Path(root, "twin")), twin)
                compare(twin, expected, whole, by)
                expected = drive(Unsharded(case, Path(root, "whole")), case)
            else:
                whole = drive(Unsharded(case, Path(root, "whole")), case)
                compare(case, expected, whole, by)
                expected = whole
            by = "sharded"
            ranks = run_on_ranks(case, Path(root, "sharded"))
            for rank, run in enumerate(ranks):
                compare(case, expected, run, f"rank {rank}", rank)
        except AssertionError as error:
            return Outcome("SILENT", _first_line(error), traceback.format_exc())
        except Exception as error:
            kind = "REFUSED" if says_why(error) else "RAW"
            reason = f"{by}: {type(error).__name__}: {_first_line(error)}"
            return Outcome(kind, reason, traceback.format_exc())
    return Outcome("EQUAL")


def _check_tame(run: list[Seen]) -> None:
    """Raise where leaves have grown so that round-off has, too. NaNs are left of infinities."""
    for seen in run:
        largest = max(_largest(leaf) for leaf in seen.params.values() if leaf.numel())
        if not largest < LARGE:
            raise OverflowError(f"leaves have grown to {largest:.2g}")


def run_on_ranks(case: Case, folder: Path) -> list[list[Seen]]:
    """Each rank's run."""
    return run_ranks(
        lambda group: drive(Sharded(case, folder, group), case), case.ranks, timeout=SECONDS
    )


def says_why(error: Exception) -> bool:
    """Whether an error is one of the package's, about what the user did."""
    ours = isinstance(error, FunctorchZeroError) and not isinstance(error, GroupError)
    return ours or "Remedy: " in str(error)


def compare(case: Case, expected: list[Seen], got: list[Seen], by: str, rank: int = 0) -> None:
    """Compare updates, buffers and metrics of each step, and the optimizer's state where both have
    one.

    Raises:
        AssertionError: naming the first difference.
    """
    for number, (want, have) in enumerate(zip(expected[1:], got[1:], strict=True)):
        at = f"{by}, step {number}: "
        moves, moved = _updates(expected, number), _updates(got, number)
        _compare_named(case, moves, moved, at + "update of ", want.params)
        own = want.buffers[rank if len(want.buffers) > rank else 0]
        _compare_named(case, own, have.buffers[0], at + "buffer ")
        if len(have.buffers) > 1:
            for one, other in zip(want.buffers, have.buffers, strict=True):
                _compare_named(case, one, other, at + "a rank's buffer ")
        known = {name: have.metrics[name] for name in want.metrics}
        _compare_named(case, want.metrics, known, at + "metric ")
        if want.opt_state:
            _compare_named(case, want.opt_state, have.opt_state, at + "optimizer's ")


def _updates(run: list[Seen], number: int) -> Named:
    before, after = run[number].params, run[number + 1].params
    return {name: after[name] - before[name] for name in before}


def _compare_named(
    case: Case, expected: Named, got: Named, at: str, held: Named | None = None
) -> None:
    assert expected.keys() == got.keys(), f"{at}has {[*got]}, expected {[*expected]}"
    for name, want in expected.items():
        have = got[name]
        assert have.shape == want.shape, f"{at}{name} has the shape {tuple(have.shape)}"
        if not want.numel():
            continue
        size = _largest(want)
        allowed = case.tolerance * size
        if held is not None:
            # A difference of two leaves has their rounding
            allowed += 4 * _last_place(want) * _largest(held[name])
        # An absolute floor, for gradients that cancel to nothing
        allowed = max(allowed, case.tolerance * 1e-4)
        wide = torch.promote_types(want.dtype, torch.float64)
        off = (have.to(wide) - want.to(wide)).abs()
        # Infinities, whose difference is a NaN, and NaNs
        same = (want == have) | (want.isnan() & have.isnan())
        worst = float(off.masked_fill(same, 0.0).max())
        assert worst <= allowed, f"{at}{name} is off by {worst:.2g} of {size:.2g}"


def _largest(tensor: Tensor) -> float:
    sizes = tensor.to(torch.promote_types(tensor.dtype, torch.float64)).abs()
    return float(sizes.nan_to_num().max())


def _last_place(tensor: Tensor) -> float:
    inexact = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if inexact else 0.0


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__


# Drawing and shrinking


def drawn(seed: int, *, known: bool = False, attempts: int = 10) -> tuple[Case, Outcome]:
    """The first valid case of a seed, and its outcome.

    Args:
        known: whether it may show known defects.
    """
    for attempt in range(attempts):
        case = draw(seed, attempt)
        if not known:
            case = without_known(case)
        found = outcome(case)
        if found.kind != "INVALID":
            return case, found
    raise RuntimeError(f"no valid case of seed {seed} in {attempts} attempts: {found.reason}")


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with every field at its plainest value that leaves it failing."""
    for field in fields(case):
        if field.default is MISSING or getattr(case, field.name) == field.default:
            continue
        plainer = replace(case, **{field.name: field.default})
        if fails(plainer):
            case = plainer
    for block in case.blocks:
        others = tuple(name for name in case.blocks if name != block)
        if others and fails(replace(case, blocks=others)):
            case = replace(case, blocks=others)
    return case


def same_defect(found: Outcome) -> Callable[[Case], bool]:
    return lambda case: outcome(case).kind == found.kind


def kind_of_reason(reason: str) -> str:
    """A reason without names and numbers, so that like reasons are counted together."""
    return re.sub(
        r"[\d.]+(e-?\d+)?", "#", re.sub(r"(path|update of|buffer|metric) \S+", r"\1 _", reason)
    )[:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:end")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--known", action="store_true", help="draw known defects, too")
    parser.add_argument("-v", action="store_true", help="show each case")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first, end = (int(number) for number in given.seeds.split(":"))
    seeds = range(first, end) if given.seed is None else [given.seed]
    table: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        case, found = drawn(seed, known=given.known)
        table[found.kind, kind_of_reason(found.reason)] += 1
        if given.v or found.kind in DEFECTS:
            print(f"{found.kind:8}{case!r}\n        {found.reason}", flush=True)
        if found.kind in DEFECTS and given.shrink:
            print(f"        shrunk to {shrink(case, same_defect(found))!r}", flush=True)
        if given.v and given.seed is not None:
            print(found.trace)
    for (kind, reason), count in sorted(table.items()):
        print(f"{count:5} {kind:8} {reason}")


if __name__ == "__main__":
    main()
