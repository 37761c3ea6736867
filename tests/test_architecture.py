"""The folders' import sets, the oracle's reach, where torch.distributed and private names of torch
are used, and the cost of importing the package."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from functorch_zero.runtime.table import Reading
from functorch_zero.sharded.program.engine import ShardedEngine
from tests.tiers import THOROUGH

PACKAGE = "functorch_zero"
ROOT = Path(__file__).parents[1] / PACKAGE
MAX_ENTRIES = 28  # a newcomer sees at the top of the package
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
    # Its door, `optim/__init__.py`, names the one for type checkers, and imports it when asked
    "optim": {"base", "layout.extent", "layout.operators", "sharded.to_torch"},
    "runtime": {
        "base", "groups", "layout", "model.casting", "model.lazy_param", "model.lazy_table",
        "model.untouched",
    },
    "step": {"base", "model", "optim", "layout.sharding"},
    "sharded_optim": {"base", "groups", "layout", "optim", "model.untouched"},
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

# Where private names of torch may be used, and how those names begin.
TORCH_PRIVATE = {"_torch_private.py": "torch.", "groups/torch_distributed.py": "torch.distributed."}

# What leads to torch's store, whose calls may wait for good, and the functions that use it: calls
# with a deadline (a `Store`); torch's making of groups, within a deadline as well; and those that
# launch ranks, which serve a store and meet at it, within a deadline of their own.
TORCHS_STORE = {
    "_get_default_store", "_default_store", "TCPStore", "PrefixStore", "HashStore", "FileStore",
    "_new_process_group_helper", "new_group", "init_process_group",
}  # fmt: skip
USERS_OF_THE_STORE = {
    ("groups/torch_distributed.py", "_default_store"),
    ("groups/torch_distributed.py", "own_store"),
    ("groups/torch_distributed.py", "torchs_store"),
    ("groups/torch_distributed.py", "_new_group"),
    ("groups/torch_distributed.py", "_next_name"),
    ("groups/torch_distributed.py", "_named"),
    ("groups/store.py", "Store"),  # these two ask for a type
    ("groups/store.py", "_behind_prefixes"),
    ("groups/rendezvous.py", "init"),
    ("groups/rendezvous.py", "_store_of"),
    ("groups/rendezvous.py", "_part_of_this_attempt"),
}
SERVES_THE_STORE = "groups/launch.py"

# Private attributes of torch's objects, by which they are known where no import shows the class.
PRIVATE_ATTRIBUTES = {
    "_base": "torch.Tensor",
    "_version": "torch.Tensor",
    "_is_view": "torch.Tensor",
    "_make_wrapper_subclass": "torch.Tensor",
    "_cdata": "torch.UntypedStorage",
    "_parameters": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_modules": "torch.nn.Module",
    "_sequence_nr": "torch.autograd.graph.Node",
    "_schema": "torch.ops",
    "_local_scalar_dense": "torch.ops.aten",
    "_should_skip_dynamo": "torch.utils._python_dispatch.TorchDispatchMode",
    "_allgather_base": "torch.distributed.ProcessGroup",
    "_reduce_scatter_base": "torch.distributed.ProcessGroup",
    "_abort_process_group": "torch.distributed.distributed_c10d",
}

# A dotted name of torch with a private part; _foreach_* and _fused_* count as public.
PRIVATE_NAME = re.compile(r"torch(\.\w+)*\._(?!_|foreach_|fused_)\w+(\.\w+)*")

# The oracle may reach all of these, of the layout one module with its imports, and nothing else.
ORACLE = ("base", "model", "optim", "step")
ORACLES_LAYOUT = "layout.sharding"

# The doors: they may import everything below them.
DOORS = {"__init__", "__main__"}


@cache  # several tests read every file
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache  # a walk takes as long as parsing
def nodes_of(source: str) -> list[ast.AST]:
    return [*ast.walk(parsed(source))]


@pytest.fixture(scope="module", autouse=True)
def trees_for_this_module_only() -> Iterator[None]:
    """The collector would walk them again and again while they grow, which takes three times as
    long as parsing, and in all later tests."""
    gc.disable()
    yield
    gc.enable()
    parsed.cache_clear()
    nodes_of.cache_clear()


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    """A file's name in the package: "optim.base", "optim" for optim/__init__.py, "errors"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def folder_of(module: str) -> str:
    top = module.partition(".")[0]
    return top if (ROOT / top).is_dir() else "base"


@cache  # several tests ask of every file
def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in it."""
    return imports_in(nodes_of(path.read_text()), path)


def imports_in(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    """The same of some nodes of the file."""
    here = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in nodes:
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


def cycle_in(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """The modules of one import cycle, the first one at both ends; () where there is none."""
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> tuple[str, ...]:
        if module in trail:
            return (*trail[trail.index(module) :], module)
        if module not in done:
            for other in sorted(graph[module]):
                if found := visit(other, (*trail, module)):
                    return found
            done.add(module)
        return ()

    return next(filter(None, (visit(module, ()) for module in graph)), ())


def test_no_import_cycles() -> None:
    """Not in functions either: there a cycle is hidden, and stays one."""
    graph = {module_name(path): runtime_imports(path) - {module_name(path)} for path in modules()}
    found = cycle_in(graph)
    assert not found, "import cycle: " + " -> ".join(found)


def test_the_check_of_import_cycles_can_fail() -> None:
    inside = "def f():\n    from .. import optim\n    return optim"
    place = ROOT / "optim" / "arguments.py"
    assert imports_in(nodes_of(inside), place) == {"optim"}
    graph: dict[str, set[str]] = {"optim": {"optim.arguments"}, "optim.arguments": set()}
    assert cycle_in(graph) == ()
    graph["optim.arguments"] = {"optim"}
    assert cycle_in(graph) == ("optim", "optim.arguments", "optim")


@cache
def runtime_imports(path: Path) -> set[str]:
    """The same without imports that only a type checker follows; those in functions among them."""
    source = path.read_text()
    blocks = [node for node in parsed(source).body if is_for_types(node)]
    for_types = {node for block in blocks for node in ast.walk(block)}
    nodes = (node for node in nodes_of(source) if node not in for_types)
    return imports_in(nodes, path) - {"", "__init__"}


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


# The parts of a step. Groups and modes, which plans extend, are made to be extended, and so is what
# a table's lookup reads.
OF_A_STEP = ("step", "runtime", "sharded_optim", "sharded")


def bases_of_a_step(classes: Iterable[type]) -> set[tuple[str, str]]:
    """The classes that extend a part of a step: (class, base)."""
    found = set()
    for each in classes:
        for base in each.__mro__[1:]:
            of_a_step = tuple(f"{PACKAGE}.{folder}." for folder in OF_A_STEP)
            if base.__module__.startswith(of_a_step) and base is not Reading:
                found.add((each.__qualname__, base.__qualname__))
    return found


def test_plans_extend_no_part_of_a_step() -> None:
    """A plan calls the functions of a step, and looks on. It knows none of their insides."""
    classes: set[type] = set()
    for path in sorted((ROOT / "planning").glob("*.py")):
        module = importlib.import_module(f"{PACKAGE}.{module_name(path)}")
        own = (x for x in vars(module).values() if isinstance(x, type))
        classes |= {each for each in own if each.__module__ == module.__name__}
    assert len(classes) > 10
    assert not bases_of_a_step(classes)


def test_the_check_of_base_classes_can_fail() -> None:
    class Nosy(ShardedEngine):
        pass

    assert bases_of_a_step([Nosy]) == {(Nosy.__qualname__, "ShardedEngine")}


def test_a_newcomer_sees_few_entries() -> None:
    entries = {path.name for path in ROOT.iterdir()} - {"__pycache__"}
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_a_folder_of_the_library_has_an_entry_in_the_sets() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == MAY_IMPORT.keys() - {"base"}


def uses_torch_distributed(source: str) -> bool:
    if "distributed" not in source:  # most files, which needn't be parsed
        return False
    for node in nodes_of(source):
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


# Functions that move tensors to a device, which may lie on the CPU before, and why they may
MAY_MOVE = {
    "devices.py: number_on": "a tensor of a device; numbers of the CPU are filled in",
    "model/deferred_init.py: DeferredInit._result": "first values, once in a run",
    "optim/interop/torch_state_dicts.py: _import_leaf": "a state of torch, once in a run",
    "sharded_optim/across.py: Sharded._all_reduce": "counts that go along with a GPU's statistics: "
    "tests/sharded/test_no_waits.py finds no optimizer that asks for them in a step",
    "sharded_optim/ferry.py: Ferry.bring": "a copied state, once until it lies in its place again",
    "testing/recorder.py: _off_by_a_rounding.off": "the noise of a test",
    "testing/runs.py: _jittered.jitter": "the noise of a test",
}


def users_of_the_store(source: str) -> set[str]:
    """The functions and classes at the top of a file that name what leads to torch's store; "" for
    lines outside of them."""
    found: set[str] = set()
    if not any(name in source for name in TORCHS_STORE):  # most files, which needn't be parsed
        return found
    for part in parsed(source).body:
        nodes = list(ast.walk(part))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.name for node in nodes if isinstance(node, ast.alias)}
        if names & TORCHS_STORE:
            found.add(getattr(part, "name", ""))
    return found


def test_each_call_of_torchs_store_has_a_deadline() -> None:
    """A machine that is lost may be the one that serves the store."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in modules()}
    assert users_of_the_store(sources.pop(SERVES_THE_STORE))
    found = {
        (place, name) for place, source in sources.items() for name in users_of_the_store(source)
    }
    assert found == USERS_OF_THE_STORE


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(): c10d._get_default_store().check(['key'])", "f"),
        ("from torch.distributed import TCPStore", ""),
        ("class A:\n    def f(self): dist.new_group([0])", "A"),
    ],
)
def test_the_check_for_torchs_store_can_fail(source: str, name: str) -> None:
    assert users_of_the_store(source) == {name}


def copies_to_devices(source: str) -> list[tuple[str, str]]:
    """The calls that may copy from the CPU to a device, for which the host waits, each with the
    function that it is in. `number_on` fills instead.

    They make tensors of numbers elsewhere than on the CPU, move a tensor to a device that isn't the
    CPU by its name, or copy a tensor that is made on the CPU in the call itself.
    """
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and _copies_to_a_device(node):
            found.append((function, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(parsed(source), "")
    return found


def _copies_to_a_device(call: ast.Call) -> bool:
    func, words = call.func, {word.arg: word.value for word in call.keywords}
    if not isinstance(func, ast.Attribute):
        return False
    if func.attr == "to":
        targets = [*call.args, *words.values()]
        return "non_blocking" not in words and any(map(_names_a_device, targets))
    if func.attr == "copy_":
        parts = [part for argument in call.args for part in ast.walk(argument)]
        return any(_is_made_on_the_cpu(part) for part in parts)
    if ast.unparse(func) in ("torch.tensor", "torch.as_tensor", "torch.asarray"):
        return not _is_cpu(words.get("device"))
    return func.attr in ("cuda", "new_tensor")


def _names_a_device(node: ast.AST) -> bool:
    """Whether an expression is a device, by its name: `device`, `x.device`, `torch.device("cuda")`,
    "cuda:1"; but for the CPU."""
    if isinstance(node, ast.Call):
        return _names_a_device(node.func) and not any(map(_is_cpu, node.args))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value != "cpu"
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.lower().endswith("device")


def _is_made_on_the_cpu(node: ast.AST) -> bool:
    """Whether an expression is a call that makes a tensor on the CPU."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    makes = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    on_cpu = any(_is_cpu(word.value) for word in node.keywords if word.arg == "device")
    moves = node.func.attr == "to" and any(map(_is_cpu, node.args))
    return node.func.attr == "cpu" or moves or (makes and on_cpu)


def _is_cpu(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cpu"


def test_no_numbers_are_copied_to_devices() -> None:
    """But by the functions that may, and by models of `testing`, which a user moves."""
    found = set()
    for path in modules():
        if path != ROOT / "testing" / "models.py":
            name = path.relative_to(ROOT).as_posix()
            found |= {f"{name}: {where}" for where, _ in copies_to_devices(path.read_text())}
    assert found == MAY_MOVE.keys()


@pytest.mark.parametrize(
    "source",
    [
        "torch.tensor(1.0, device=x.device)",
        "torch.as_tensor(x)",
        "values.new_tensor([1])",
        "x.cuda()",
        "x.to(self._device)",
        "x.to(y.device, y.dtype)",
        "x.to(device=where.device)",
        "x.to('cuda:1')",
        "x.to(torch.device('cuda', 0))",
        "x.copy_(torch.full((), 1.0, device='cpu'))",
        "x.copy_(y.cpu().view(-1))",
    ],
)
def test_the_check_of_copies_to_devices_can_fail(source: str) -> None:
    assert copies_to_devices(f"class A:\n    def f(self):\n        {source}") == [("A.f", source)]


def test_the_check_of_copies_to_devices_gives_no_false_alarm() -> None:
    for source in (
        'torch.tensor(1.0, device="cpu")',
        "torch.full((), 1.0)",
        "x.to(y.dtype)",
        'x.to("cpu", non_blocking=True)',
        'x.to("cpu", torch.float32, copy=True)',
        "x.to(device, non_blocking=True)",
        'x.to(torch.device("cpu"))',
        "x.copy_(y)",
        "x.copy_(torch.empty_like(x))",
    ):
        assert not copies_to_devices(source), source


def private_torch_names(source: str) -> set[str]:
    """The private names of torch that a file imports, uses, or has in a string, in full."""
    nodes = nodes_of(source)
    known = meanings(nodes)
    found = {*known.values()}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            found.add(in_full(node, known))
            if ast.unparse(node.value) != "self":
                found.add(owned(node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value, owned(node.value)}  # for getattr, attrgetter, sys.modules
        elif isinstance(node, ast.ClassDef):
            found |= {owned(part.name) for part in node.body if isinstance(part, ast.FunctionDef)}
    return {name for name in found if PRIVATE_NAME.fullmatch(name)}


def meanings(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The dotted names that a file's own names stand for: "c10d" for
    "torch.distributed.distributed_c10d"."""
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            known |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            meaning = in_full(node.value, known)
            known |= {t.id: meaning for t in targets if isinstance(t, ast.Name)}
    return known


def in_full(node: ast.expr, known: dict[str, str]) -> str:
    first, dot, rest = ast.unparse(node).partition(".")
    return known.get(first, first) + dot + rest


def owned(attribute: str) -> str:
    owner = PRIVATE_ATTRIBUTES.get(attribute)
    return f"{owner}.{attribute}" if owner else ""


def test_private_names_of_torch_have_their_places() -> None:
    for path in modules():
        place = str(path.relative_to(ROOT))
        names = private_torch_names(path.read_text())
        may = TORCH_PRIVATE.get(place)
        stray = {name for name in names if may is None or not name.startswith(may)}
        assert not stray, f"{place} uses {sorted(stray)}: add a function to _torch_private.py"
        assert names or may is None, f"{place} has no private name any more: remove it"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._functorch import pyfunctorch", "torch._functorch.pyfunctorch"),
        ("from torch import _guards", "torch._guards"),
        ("import torch\ntorch._C._is_tracing()", "torch._C._is_tracing"),
        ("from torch import Tensor\nf = Tensor._is_view", "torch.Tensor._is_view"),
        ("import torch.autograd.graph as g\nx = g\nx._get_tid()", "torch.autograd.graph._get_tid"),
        ("def f(leaf): return leaf.detach()._base", "torch.Tensor._base"),
        ("f = attrgetter('_version')", "torch.Tensor._version"),
        ("found = 'torch._inductor' in sys.modules", "torch._inductor"),
        (
            "class Mode(M):\n    def _should_skip_dynamo(cls): pass",
            "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
        ),
    ],
)
def test_the_check_of_private_names_can_fail(source: str, name: str) -> None:
    assert name in private_torch_names(source)


def test_the_check_of_private_names_lets_others_pass() -> None:
    source = """
import torch
from ._torch_private import base_of
torch._foreach_add_(xs, 1)
torch._fused_adamw_(*xs)
torch.Tensor.__len__(self._buffers)
state._replace(step=1)  # torch._dynamo
"""
    assert not private_torch_names(source)


def beyond_the_oracle(reached: set[str]) -> set[str]:
    may = {"layout", *with_imports(ORACLES_LAYOUT)}
    return {m for m in reached if folder_of(m) not in ORACLE and m not in may}


def with_imports(module: str) -> set[str]:
    """A module, and all of the package that it imports, directly or not."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    others = runtime_imports(path) if path.is_file() else set()
    return {module}.union(*map(with_imports, others))


def modules_after(code: str) -> set[str]:
    """The package's modules that are loaded in a fresh process when `code` has run.

    The package itself is bare, since its own __init__ imports all of it.
    """
    bare = f"""
import sys, types
package = sys.modules["{PACKAGE}"] = types.ModuleType("{PACKAGE}")
package.__path__ = [{str(ROOT)!r}]
{code}
print(*(name for name in sys.modules if name.startswith("{PACKAGE}.")))
"""
    command = [sys.executable, "-c", bare]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return {name.removeprefix(f"{PACKAGE}.") for name in out.stdout.split()}


UNSHARDED_STEP = """
import torch
from functorch_zero import optim
from functorch_zero.model.functionalize import functionalize
from functorch_zero.step.evaluate import eval_step
from functorch_zero.step.train import train_step

apply, params, buffers = functionalize(torch.nn.Linear(3, 1))
def loss_fn(params, buffers, batch):
    return apply(params, buffers, batch)[0].square().mean()
step = train_step(loss_fn, optim.adamw(1e-3))
state, metrics = step(step.init(params, buffers), torch.ones(2, 3))
assert int(state.step) == 1 and metrics["loss"].isfinite()
eval_step(lambda *given: {"loss": loss_fn(*given)})(state, torch.ones(2, 3))
"""


PROGRAM = """
import torch
from functorch_zero import optim
from functorch_zero.step import random
from functorch_zero.step.hvp import hvp
from functorch_zero.step.program import dot, unshard, value_and_grad, zero_updates
from functorch_zero.step.program_step import program_step

optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
def loss_fn(params, x):
    return (unshard(params)["w"] * x).square().sum()
def init(params):
    return {"params": params, "opt": optimizer.init(params)}
def program(value, x):
    params = value["params"]
    loss, grads = value_and_grad(loss_fn)(params, x)
    probe = random.normal(params)
    _, _, product = hvp(loss_fn)(params, probe, x)
    curvature = dot(probe, product)
    params, opt = optimizer.apply(grads, value["opt"], params)
    params, opt = optimizer.apply(zero_updates(params), opt, params)
    return {"params": params, "opt": opt}, {"loss": loss, "curvature": curvature}
step = program_step(program, init=init)
params = {"w": torch.ones(3, requires_grad=True)}
state, metrics = step(step.init(params), torch.ones(3))
state, metrics = step(step.refit(state, params), torch.ones(3))
assert int(state.step) == 2 and metrics["curvature"].isfinite()
"""


USED = {
    "optim", "model.functionalize", "step.train", "step.evaluate", "step.program_step", "step.hvp",
    "step.random", "step.refit",
}  # fmt: skip


@THOROUGH
def test_the_oracle_reaches_nothing_sharded() -> None:
    """The oracle must not contain the code that it proves, whether imported at once or on use."""
    reached = modules_after(UNSHARDED_STEP + PROGRAM)
    assert reached >= USED
    stray = beyond_the_oracle(reached)
    assert not stray, f"the unsharded step reaches {sorted(stray)}"


def test_the_check_of_the_oracles_reach_can_fail() -> None:
    stray = {"runtime.unshard", "groups", "layout.build", "sharded_optim.across"}
    known = {"layout.sharding", "layout.extent", "step.train", "optim", "tree"}
    assert beyond_the_oracle(stray | known) == stray


def test_the_check_of_imports_can_fail() -> None:
    assert not allowed("optim.base", "layout.layout")
    assert not allowed("step.train", "sharded.train")
    assert allowed("optim.base", "layout.extent")


@THOROUGH
def test_import_is_quick() -> None:
    """Importing the package adds little to importing torch.

    The best of several fresh processes, in their own CPU time, with bytecode as of any package that
    has been imported before.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = (
        "import time; clock = time.process_time; start = clock(); import torch; between = clock(); "
        "import functorch_zero; print(clock() - between, between - start)"
    )
    times = []
    for _ in range(5):
        out = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env=env,
        )
        own, torchs = map(float, out.stdout.split())
        times.append(own / max(torchs, 1.0))
        if min(times) < MAX_IMPORT_SECONDS:
            return
    raise AssertionError(f"import functorch_zero took {times} of the time that torch takes")


@THOROUGH
def test_import_shows_no_warning() -> None:
    command = [sys.executable, "-W", "error", "-c", "import functorch_zero"]
    subprocess.run(command, check=True, timeout=60)


# torch's functions that make tensors on the default device, where they aren't told another
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def made_on_the_default_device(source: str) -> list[int]:
    """The lines of calls of torch's factories that name no device."""
    found = []
    for node in nodes_of(source):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        names = {keyword.arg for keyword in node.keywords}
        if is_torchs and node.func.attr in FACTORIES and "device" not in names:
            found.append(node.lineno)
    return found


def test_tensors_are_made_on_a_named_device() -> None:
    """Under a user's `torch.set_default_device("cuda")`, counters and seeds would lie on the GPU,
    and each read of one would wait for it."""
    models = ROOT / "testing" / "models.py"  # as users write them
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line in made_on_the_default_device(path.read_text())
        if path != models
    ]
    assert not found, f"device= is missing: {found}"
    source = "x = torch.zeros(3)\ny = torch.zeros(3, device=x.device)\nz = x.new_zeros(3)"
    assert made_on_the_default_device(source) == [1]
