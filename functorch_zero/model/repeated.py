"""The repeated modules of a model, such as a transformer's layers: the units where none are chosen.

What runs isn't known here, only what modules there are: one whose forward is never called is right
as a unit, too, since each read of its leaves gathers them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ..tree import ancestors

# Elements. A gather and a reduction of fewer cost more time to start than to send
LEAST = 10_000
_CONTAINERS = nn.ModuleList | nn.ModuleDict | nn.Sequential


class _Found(NamedTuple):
    """A module that may be a unit."""

    kind: type[nn.Module]
    shapes: tuple[Any, ...]  # of its leaves, with their paths in it
    why: str


def runs(module: nn.Module) -> bool:
    """Whether a module has a forward: a ModuleList has none, so no call of it could enter a
    unit."""
    # torch's own stands in where a class has none
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def opened(model: nn.Module) -> set[str]:
    """The paths of the model and of the containers in it with containers alone around them. What
    no call would enter counts as one."""
    found = {""}
    # Parents come before their children
    for path, module in model.named_modules():
        is_container = isinstance(module, _CONTAINERS) or not runs(module)
        if path and parent_of(path) in found and is_container:
            found.add(path)
    return found


def repeated_modules(model: nn.Module) -> dict[str, str]:
    """The repeated modules that are units: path -> why. None lies in another.

    A candidate has children, and lies in a ModuleList or Sequential, where its class is found at
    least twice; or Hugging Face's `_no_split_modules` names its class. One around others is a
    stage, and opened, if it is a Sequential or none of its class has its shapes. Else it is the
    unit: its inner ones may be experts, of which ranks use different ones.
    """
    candidates = _candidates(model)
    stages = around(candidates)
    same = Counter((found.kind, found.shapes) for found in candidates.values())
    twins = {kind for (kind, _), number in same.items() if number > 1}
    units: dict[str, str] = {}
    for path, found in candidates.items():
        is_stage = issubclass(found.kind, nn.Sequential) or found.kind not in twins
        is_opened = path in stages and is_stage
        if not is_opened and units.keys().isdisjoint(ancestors(path)):
            units[path] = found.why
    return units


def _candidates(model: nn.Module) -> dict[str, _Found]:
    """The modules that may be units, by path, outer ones first."""
    modules = dict(model.named_modules())
    names: set[str] = set()
    for module in modules.values():
        names.update(getattr(module, "_no_split_modules", None) or ())
    skipped = opened(model)  # their children are units one by one
    found: dict[str, _Found] = {}
    for path, module in modules.items():
        if path in skipped or not runs(module):
            continue
        name, parent = type(module).__name__, modules[parent_of(path)]
        if name in names:
            why = f"{name}, named in _no_split_modules"
        elif isinstance(parent, nn.ModuleList | nn.Sequential) and any(module.children()):
            why = f"{name}, repeated in ModuleLists or Sequentials"
        else:
            continue
        if sum(p.numel() for p in module.parameters()) >= LEAST:
            shapes = tuple((leaf, tuple(p.shape)) for leaf, p in module.named_parameters())
            found[path] = _Found(type(module), shapes, why)
    kinds = Counter(candidate.kind for candidate in found.values())
    return {
        path: candidate
        for path, candidate in found.items()
        if kinds[candidate.kind] > 1 or candidate.kind.__name__ in names
    }


def around(paths: Iterable[str]) -> set[str]:
    """The paths of the modules that have one of these inside; none is around itself."""
    return {outer for path in paths for outer in ancestors(path)[1:]}


def parent_of(path: str) -> str:
    """The path of the module around this one."""
    return path.rpartition(".")[0]
