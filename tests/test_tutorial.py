"""The tutorial is a notebook whose outputs are those of a run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from runpy import run_path
from typing import Any

import nbformat
import pytest

from tests.test_docs import long_lines
from tests.tiers import THOROUGH

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "begin" / "tutorial.ipynb"


def read() -> Any:
    return nbformat.read(TUTORIAL, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook after a run in a fresh kernel, with one thread as all scripts of the tests."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return run_path(str(ROOT / "docs" / "run_tutorial.py"))["executed"](notebook)


@THOROUGH
def test_the_tutorial_shows_what_a_fresh_kernel_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = read()
    made = executed(stored, monkeypatch)
    for before, after in zip(code_cells(stored), code_cells(made), strict=True):
        assert before.outputs == after.outputs, "run python -m docs.run_tutorial again"


@THOROUGH
def test_a_cell_that_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    with pytest.raises(Exception, match="AssertionError"):
        executed(notebook, monkeypatch)


def test_the_tutorial_was_run_from_top_to_bottom() -> None:
    cells = code_cells(read())
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)


def test_the_tutorials_text() -> None:
    text = "\n".join(cell.source for cell in read().cells if cell.cell_type == "markdown")
    assert len(text.split()) <= 900 and not long_lines(text)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (TUTORIAL.parent / target).exists(), target
