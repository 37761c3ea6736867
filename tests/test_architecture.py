"""The folders' import sets, where torch.distributed is used, and the cost of importing the
package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "functorch_zero"
ROOT = Path(__file__).parents[1] / PACKAGE
MAX_ENTRIES = 26  # a newcomer sees at the top of the package
MAX_IMPORT_SECONDS = 0.3  # per second that importing torch takes

# What the modules of each folder may import from the rest of the package: whole folders, or single
# modules of one. "base" is the files at the top. Every entry is needed: the set is held exactly.
BELOW_THE_TOOLS = {
    "base", "groups", "layout", "model", "optim", "runtime", "step", "sharded_optim", "sharded",
}  # fmt: skip
MAY_IMPORT = {
    "base": set(),
    "groups": {"base"},
    "layout": {"base"},
    "model": {"base"},
    "optim": {"base", "layout.extent"},
    "runtime": {"base", "groups", "layout", "model.lazy_param", "model.casting"},
    "step": {"base", "model", "optim", "layout.sharding"},
    "sharded_optim": {"base", "groups", "layout", "optim"},
    "sharded": {
        "base", "groups", "layout", "model", "optim", "runtime", "step", "sharded_optim",
    },
    "checkpoint": BELOW_THE_TOOLS,
    "planning": BELOW_THE_TOOLS,
    "testing": BELOW_THE_TOOLS,
}  # fmt: skip

# Imports that the sets above forbid and that are still there. This list may only get shorter.
EXCEPTIONS: set[tuple[str, str]] = set()

# Where torch.distributed may be used: the groups, and the reader of its checkpoints.
TORCH_DISTRIBUTED = ("groups", "checkpoint/dcp.py")

# The doors: they may import everything below them.
DOORS = {"__init__", "__main__"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    """A file's name in the package: "optim.base", "optim" for optim/__init__.py, "errors"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def folder_of(module: str) -> str:
    top = module.partition(".")[0]
    return top if (ROOT / top).is_dir() else "base"


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in it."""
    here = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")]
            found |= {resolve([part for part in base if part], alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {resolve(alias.name.split("."), "") for alias in node.names}
    return found - {""}


def resolve(base: list[str], name: str) -> str:
    """`from base import name` takes the module `base.name` if there is one, else `base`.

    Nothing for modules of other packages.
    """
    if base[:1] != [PACKAGE]:
        return ""
    inside = base[1:]
    for parts in ([*inside, name], inside):
        place = ROOT.joinpath(*parts)
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
            return ".".join(parts) or "__init__"
    raise AssertionError(f"no module for from {'.'.join(base)} import {name}")


def imports_between_folders() -> Iterator[tuple[str, str]]:
    """(importing module, imported module) wherever the two are in different folders."""
    for path in modules():
        module = module_name(path)
        if module in DOORS:
            continue
        for other in imports_of(path):
            if folder_of(other) != folder_of(module):
                yield module, other


def allowed(module: str, other: str) -> bool:
    may = MAY_IMPORT[folder_of(module)]
    return folder_of(other) in may or other in may


def test_folders_import_only_what_lies_below_them() -> None:
    forbidden = {pair for pair in imports_between_folders() if not allowed(*pair)}
    assert forbidden - EXCEPTIONS == set(), "an import that MAY_IMPORT forbids"
    assert EXCEPTIONS - forbidden == set(), "an exception that is no longer needed: remove it"


def test_the_sets_allow_nothing_that_is_not_used() -> None:
    """Above the tools: they may use all of the library."""
    used: dict[str, set[str]] = {folder: set() for folder in MAY_IMPORT}
    for module, other in imports_between_folders():
        used[folder_of(module)] |= {folder_of(other), other}
    for folder, may in MAY_IMPORT.items():
        if may is not BELOW_THE_TOOLS:
            assert may <= used[folder], f"{folder} no longer imports {may - used[folder]}"


def test_no_import_cycles() -> None:
    graph = {module_name(path): runtime_imports(path) - {module_name(path)} for path in modules()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join((*trail, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def runtime_imports(path: Path) -> set[str]:
    """The same without imports that only a type checker follows."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not is_for_types(node)]
    here = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")]
            found |= {resolve([part for part in base if part], alias.name) for alias in node.names}
    return found - {"", "__init__"}


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_a_newcomer_sees_few_entries() -> None:
    entries = {path.name for path in ROOT.iterdir()} - {"__pycache__"}
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_a_folder_of_the_library_has_an_entry_in_the_sets() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == MAY_IMPORT.keys() - {"base"}


def uses_torch_distributed(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            return True
    return False


def test_only_groups_use_torch_distributed() -> None:
    users = [path for path in modules() if uses_torch_distributed(path.read_text())]
    places = [str(path.relative_to(ROOT)) for path in users]
    assert all(place.startswith(TORCH_DISTRIBUTED) for place in places), places


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import get_rank",
        "import torch\nx = torch.distributed.get_rank()",
    ],
)
def test_the_check_for_torch_distributed_can_fail(source: str) -> None:
    assert uses_torch_distributed(source)
    assert not uses_torch_distributed("import torch\nfrom torch import nn")


def test_the_check_of_imports_can_fail() -> None:
    assert not allowed("optim.base", "layout.layout")
    assert not allowed("step.train", "sharded.train")
    assert allowed("optim.base", "layout.extent")


def test_import_is_quick() -> None:
    """Importing the package adds little to importing torch.

    The best of several fresh processes, in their own CPU time.
    """
    code = (
        "import time; clock = time.process_time; start = clock(); import torch; between = clock(); "
        "import functorch_zero; print(clock() - between, between - start)"
    )
    times = []
    for _ in range(5):
        out = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
        )
        own, torchs = map(float, out.stdout.split())
        times.append(own / max(torchs, 1.0))
        if min(times) < MAX_IMPORT_SECONDS:
            return
    raise AssertionError(f"import functorch_zero took {times} of the time that torch takes")


def test_import_shows_no_warning() -> None:
    command = [sys.executable, "-W", "error", "-c", "import functorch_zero"]
    subprocess.run(command, check=True, timeout=60)
