"""Who may import whom, what an import costs, and how long a module may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "functorch_zero"
MAX_LINES = 400
MAX_IMPORT_SECONDS = 0.3

# A module may import its own level and lower ones. A folder counts as one module here.
LEVELS = {
    "errors": 0,
    "precision": 0,
    "tree": 0,
    "watches": 1,
    "version": 0,
    "handle": 1,
    "layout": 1,
    "places": 1,
    "remat": 1,
    "regions": 1,
    "ranges": 0,
    "units": 1,
    "policies": 1,
    "finite": 1,
    "lowering": 1,
    "groups": 1,
    "collectives": 2,
    "flats": 2,
    "across": 2,
    "buffers": 2,
    "bunches": 2,
    "handshake": 2,
    "owners": 2,
    "pieces": 2,
    "sharding": 2,
    "state_plan": 2,
    "description": 2,
    "sharded": 2,
    "optim": 2,
    "functional": 2,
    "deferred": 2,
    "sinks": 3,
    "sources": 3,
    "unit": 3,
    "losses": 1,
    "step": 3,
    "measures": 3,
    "evaluation": 3,
    "levels": 4,
    "reports": 4,
    "shares": 4,
    "state_layout": 4,
    "options": 4,
    "prepared": 4,
    "broadcast": 5,
    "sharded_evaluation": 5,
    "rounds": 5,
    "shard": 5,
    "checkpoint": 6,
    "planning": 6,
    "testing": 6,
    "__init__": 7,
    "__main__": 7,
}

# What optim may know of the rest: nothing of groups, layouts and collectives.
OPTIM_MAY_IMPORT = {"optim", "across", "errors", "tree"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def dotted(path: Path) -> tuple[str, ...]:
    """A file's place in the package: ("optim", "base"); ("optim", "__init__"); ("shard",)."""
    return path.relative_to(ROOT).with_suffix("").parts


def imported(path: Path, *, types: bool = True) -> set[tuple[str, ...]]:
    """What a module imports from this package, as places in it; without what only a type checker imports, if asked."""
    here = dotted(path)[:-1]
    found = set()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if types or not is_for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                start = here[: len(here) - (node.level - 1)]
            elif (node.module or "").split(".")[0] == ROOT.name:
                start = ()
            else:
                continue
            base = start + tuple((node.module or "").removeprefix(ROOT.name).strip(".").split("."))
            base = tuple(part for part in base if part)
            for alias in node.names:
                found.add(resolve((*base, alias.name), base))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                if parts[0] == ROOT.name:
                    found.add(resolve(parts[1:], ()))
    return found


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def resolve(name: tuple[str, ...], base: tuple[str, ...]) -> tuple[str, ...]:
    """`from base import name` takes the module `name` where there is one, else the module `base`."""
    for parts in (name, base):
        if ROOT.joinpath(*parts).with_suffix(".py").is_file() and parts:
            return parts
        if (ROOT.joinpath(*parts) / "__init__.py").is_file():
            return (*parts, "__init__")
    raise AssertionError(f"no module for {name}")


def level_of(place: tuple[str, ...]) -> int:
    assert place[0] in LEVELS, f"{'.'.join(place)} is not in LEVELS: decide which level it is"
    return LEVELS[place[0]]


@pytest.mark.parametrize("path", modules(), ids=lambda p: ".".join(dotted(p)))
def test_no_module_imports_a_higher_one(path: Path) -> None:
    here = dotted(path)
    for other in imported(path):
        assert level_of(other) <= level_of(here), f"{'.'.join(here)} imports {'.'.join(other)}, which is higher"


def test_no_import_cycles() -> None:
    graph = {dotted(path): imported(path, types=False) - {dotted(path)} for path in modules()}
    done: set[tuple[str, ...]] = set()

    def visit(place: tuple[str, ...], trail: tuple[tuple[str, ...], ...]) -> None:
        assert place not in trail, "import cycle: " + " -> ".join(".".join(p) for p in (*trail, place))
        if place not in done:
            for other in sorted(graph[place]):
                visit(other, (*trail, place))
            done.add(place)

    for place in graph:
        visit(place, ())


def test_optim_knows_no_ranks() -> None:
    for path in sorted((ROOT / "optim").glob("*.py")):
        for other in imported(path):
            assert other[0] in OPTIM_MAY_IMPORT, f"optim/{path.name} imports {'.'.join(other)}"


def uses_torch_distributed(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names):
            return True
    return False


def test_only_groups_use_torch_distributed() -> None:
    users = [path for path in modules() if uses_torch_distributed(path.read_text())]
    assert all(path.parent.name == "groups" for path in users), users


@pytest.mark.parametrize(
    "source",
    ["import torch.distributed as dist", "from torch import distributed", "from torch.distributed import get_rank",
     "import torch\nx = torch.distributed.get_rank()"],
)  # fmt: skip
def test_the_check_for_torch_distributed_can_fail(source: str) -> None:
    assert uses_torch_distributed(source)
    assert not uses_torch_distributed("import torch\nfrom torch import nn")


@pytest.mark.parametrize("path", modules(), ids=lambda p: ".".join(dotted(p)))
def test_modules_stay_short(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{num_lines} lines: is there more than one idea in it?"


def test_import_is_quick() -> None:
    """Importing the package adds little to importing torch: that takes a second, or more where the machine is slow.

    The best of several fresh processes, in their own time.
    """
    code = (
        "import time; clock = time.process_time; start = clock(); import torch; between = clock(); "
        "import functorch_zero; print(clock() - between, between - start)"
    )
    times = []
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
        own, torchs = map(float, out.stdout.split())
        times.append(own / max(torchs, 1.0))
        if min(times) < MAX_IMPORT_SECONDS:
            return
    raise AssertionError(f"import functorch_zero took {times} of what importing torch takes")


def test_import_shows_no_warning() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", "import functorch_zero"], check=True, timeout=60)


def test_contributors_are_shown_every_module() -> None:
    shown = set(re.findall(r"`(\w+)/?`", (ROOT.parent / "docs" / "contributing.md").read_text()))
    assert {name for name in LEVELS if not name.startswith("__")} <= shown
