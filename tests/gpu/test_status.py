"""The page of what no GPU has run: it names the files with code for GPUs, no others, and real
stages."""

from __future__ import annotations

import ast
import re

import torch

from tests.gpu.model import GPT
from tests.gpu.stage import STAGES
from tests.scripts import ROOT

PACKAGE = ROOT / "functorch_zero"
PAGE = (ROOT / "docs" / "maintain" / "gpu-status.md").read_text()


def words(tree: ast.AST) -> set[str]:
    """Names, attributes, keywords and strings of the code; docstrings and comments are none."""
    prose = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # expressions of their own: docstrings
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            found.add(node.value)
    return found


def mentions(source: str, pattern: str) -> bool:
    """Whether the code has a word like this."""
    found = words(ast.parse(source))
    return any(re.search(pattern, word, re.IGNORECASE) for word in found)


def asks_for_the_cpu(tree: ast.AST) -> bool:
    """Whether the code goes another way on a CPU than elsewhere. An assertion has one way only."""
    if isinstance(tree, ast.Assert):
        return False
    if isinstance(tree, ast.Attribute) and tree.attr == "is_cpu":
        return True
    if isinstance(tree, ast.Compare):  # with "cpu", or with a tuple of types
        operands = map(ast.unparse, tree.comparators)
        if any(re.match(r"\(?'cpu'", operand) for operand in operands):
            return True
    return any(asks_for_the_cpu(node) for node in ast.iter_child_nodes(tree))


def is_for_gpus(source: str) -> bool:
    """Whether some of the code runs on GPUs alone."""
    on_gpus, on_the_cpu = (re.search(word, source, re.IGNORECASE) for word in ("cuda|nccl", "cpu"))
    return bool(on_gpus and mentions(source, "cuda|nccl")) or bool(
        on_the_cpu and asks_for_the_cpu(ast.parse(source))
    )


def test_the_page_names_every_file_for_gpus() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if is_for_gpus(path.read_text())]
    names = {path.relative_to(PACKAGE).as_posix() for path in files}
    assert len(names) > 8
    missing = sorted(name for name in names if f"`{name}`" not in PAGE)
    assert not missing, f"docs/maintain/gpu-status.md lacks {missing}"


def test_the_files_are_found_by_their_code() -> None:
    assert is_for_gpus("if x.is_cuda:\n    pass")
    assert is_for_gpus('torch.device("cuda")')
    assert is_for_gpus("small = x.is_cpu")
    assert is_for_gpus('if x.device.type in ("cpu", "meta"):\n    pass')
    assert not is_for_gpus('y = torch.ones(1, device="cpu") < 1')
    assert not is_for_gpus('assert x.device.type == "cpu"\ny = torch.ones(1, device="cpu")')
    assert not is_for_gpus('"""For CUDA."""\nx = 1  # over NCCL')


def test_the_page_names_files_that_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    missing = [name for name in named if not any((d / name).exists() for d in (PACKAGE, ROOT))]
    assert not missing


def table() -> list[tuple[str, str]]:
    """The files and the stages of each row of the branches."""
    rows = [row.split(" | ") for row in PAGE[PAGE.index("| file | branch |") :].splitlines()[2:]]
    return [(row[0], row[2]) for row in rows]


def test_the_listed_files_have_code_for_devices() -> None:
    files = {name for cell, _ in table() for name in re.findall(r"`([\w/]+\.py)`", cell)}
    assert len(files) > 15
    for name in files:
        source = (PACKAGE / name).read_text()
        found = is_for_gpus(source) or mentions(source, "stream|device")
        assert found, f"{name} has no code for GPUs"


def test_the_docs_name_the_models_sizes() -> None:
    sizes = {}
    for size in ("small", "large"):
        with torch.device("meta"):
            sizes[size] = sum(leaf.numel() for leaf in GPT(size).parameters())
    small, large = f"{sizes['small'] / 1e6:.1f} million", f"{sizes['large'] / 1e9:.3f} billion"
    benchmarks = (ROOT / "docs" / "maintain" / "measurements.md").read_text()
    for text in (PAGE, benchmarks[benchmarks.index("tests/gpu/session.py") :]):
        assert small in text and large in text
        others = set(re.findall(r"[\d.,]+ (?:m|b)illion", text)) - {small, large}
        assert not others


def test_the_page_names_every_stage() -> None:
    assert re.findall(r"^\| [ABC] \| ([\w-]+) \|", PAGE, re.MULTILINE) == [*STAGES]


def test_branches_name_real_stages() -> None:
    for files, stages in table():
        first = [re.split(r"[: ]", part.strip())[0] for part in stages.split(",")]
        assert first[0] in ("none", *STAGES), files
