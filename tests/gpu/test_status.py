"""The page of what no GPU has run: it names every file with code for CUDA or NCCL, and real
stages."""

from __future__ import annotations

import ast
import re

import torch

from tests.gpu.model import GPT
from tests.gpu.stage import STAGES
from tests.scripts import ROOT

PACKAGE = ROOT / "functorch_zero"
PAGE = (ROOT / "docs" / "gpu-status.md").read_text()


def words(tree: ast.AST) -> set[str]:
    """Names, attributes and strings of the code; docstrings and comments are none."""
    prose = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # expressions of their own: docstrings
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            found.add(node.value)
    return found


def is_for_gpus(source: str) -> bool:
    return any(re.search("cuda|nccl", word, re.IGNORECASE) for word in words(ast.parse(source)))


def test_the_page_names_every_file_for_gpus() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if is_for_gpus(path.read_text())]
    names = {path.relative_to(PACKAGE).as_posix() for path in files}
    assert len(names) > 8
    missing = sorted(name for name in names if f"`{name}`" not in PAGE)
    assert not missing, f"docs/gpu-status.md lacks {missing}"


def test_the_files_are_found_by_their_code() -> None:
    assert is_for_gpus("if x.is_cuda:\n    pass")
    assert is_for_gpus('torch.device("cuda")')
    assert not is_for_gpus('"""For CUDA."""\nx = 1  # over NCCL')


def test_the_page_names_files_that_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    missing = [name for name in named if not any((d / name).exists() for d in (PACKAGE, ROOT))]
    assert not missing


def test_the_docs_name_the_models_sizes() -> None:
    sizes = {}
    for size in ("small", "large"):
        with torch.device("meta"):
            sizes[size] = sum(leaf.numel() for leaf in GPT(size).parameters())
    small, large = f"{sizes['small'] / 1e6:.1f} million", f"{sizes['large'] / 1e9:.3f} billion"
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    for text in (PAGE, benchmarks[benchmarks.index("tests/gpu/session.py") :]):
        assert small in text and large in text
        others = set(re.findall(r"[\d.,]+ (?:m|b)illion", text)) - {small, large}
        assert not others


def test_the_page_names_every_stage() -> None:
    assert re.findall(r"^\| [ABC] \| ([\w-]+) \|", PAGE, re.MULTILINE) == [*STAGES]


def test_branches_name_real_stages() -> None:
    table = PAGE[PAGE.index("| file | branch |") :].splitlines()[2:]
    for row in table:
        stages = row.split(" | ")[2]
        first = [re.split(r"[: ]", part.strip())[0] for part in stages.split(",")]
        assert "none" in first[0] or first[0] in STAGES, row
