"""A stage's findings: lines with a verdict each, written to a file as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PASS, FAIL, NEEDS_CUDA, MEASURED = "pass", "FAIL", "needs CUDA", "measured"
# The first of these that a line has is the stage's verdict
WORST_FIRST = (FAIL, NEEDS_CUDA, PASS, MEASURED)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Report:
    """The lines of one stage.

    Args:
        file: holds the lines as JSON at any moment, so that a stage that is killed leaves them.
        tiny: tiny models and few steps, for a dry run.
    """

    def __init__(self, file: Path, *, tiny: bool) -> None:
        self.tiny = tiny
        self.lines: list[dict[str, Any]] = []
        self._file = file

    def measured(self, name: str, found: Any) -> None:
        """A number that nothing is asked of."""
        self._add(name, MEASURED, found, "")

    def check(self, name: str, found: Any, ok: bool, wanted: str) -> None:
        """A number, or another finding, and whether it is as wanted on any device."""
        self._add(name, PASS if ok else FAIL, found, wanted)

    def check_result(self, name: str, found: Any, ok: bool, wanted: str) -> None:
        """The same of code for a GPU: a wrong result fails on any device, and a right one passes on
        a GPU only."""
        verdict = FAIL if not ok else PASS if CUDA else NEEDS_CUDA
        self._add(name, verdict, found, wanted)

    def check_on_cuda(self, name: str, found: Any, ok: bool, wanted: str) -> None:
        """The same of times, memory and waits, of which a CPU says nothing: it never fails."""
        verdict = NEEDS_CUDA if not CUDA else PASS if ok else FAIL
        self._add(name, verdict, found, wanted)

    def needs(self, name: str, what: str = "CUDA") -> None:
        """A check that this machine can't run."""
        self._add(name, NEEDS_CUDA, None, f"needs {what}")

    @contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """Around the code of a check that may raise: then it has failed, and the stage goes on."""
        try:
            yield
        except Exception as error:
            self.check(name, f"{type(error).__name__}: {error}"[:400], False, "no error")

    @property
    def verdict(self) -> str:
        """The worst of the lines' verdicts."""
        found = {line["verdict"] for line in self.lines}
        return next((verdict for verdict in WORST_FIRST if verdict in found), FAIL)

    def _add(self, name: str, verdict: str, found: Any, wanted: str) -> None:
        line = {"name": name, "verdict": verdict, "found": found, "wanted": wanted}
        self.lines.append(line)
        print(f"{verdict:10} {name}: {found}" + (f" (wanted: {wanted})" if wanted else ""))
        whole = {"verdict": self.verdict, "lines": self.lines}
        self._file.write_text(json.dumps(whole, indent=1, default=str))
