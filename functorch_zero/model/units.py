"""Which leaves of a module form a unit: decided once, by `functionalize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..params import UnitSpec
from ..tree import ancestors, path_matches
from .slots import Slot

UnitRule = type[nn.Module] | Callable[[str, nn.Module], bool] | str
Units = UnitRule | Sequence[UnitRule] | None

SMALL = 8  # a unit of less than 1/SMALL of its neighbour's elements joins it


@dataclass
class _Draft:
    """A unit in the making."""

    modules: list[str]
    leaves: list[str]
    size: int
    joinable: bool


def find_units(model: nn.Module, units: Units, slots: Iterable[Slot]) -> tuple[UnitSpec, ...]:
    """Partition the model's leaves into units.

    Args:
        units: a module class, a predicate `(path, module)`, a pattern of paths ("blocks.*"), or
            several of them.
            None: each child of the model is a unit, and containers (ModuleList, Sequential,
            ModuleDict) are opened.
        slots: every place where a parameter is used; a tied one has several.

    A leaf belongs to the innermost unit around all its places. What is in none of the chosen units
    forms units of its own, one for each largest module that holds no chosen one; small ones join a
    neighbour.
    """
    chosen = {
        path
        for path, module in model.named_modules()
        if path and matches(units, model, path, module)
    }
    if units is not None and not chosen:
        raise ValueError(f"units={units!r} matches no module of {type(model).__name__}")
    homes: dict[str, str] = {}
    for module, _, leaf in slots:
        homes[leaf] = module if leaf not in homes else _common_parent(homes[leaf], module)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    drafts: dict[str, _Draft] = {}
    for leaf in sizes:
        unit = _innermost(homes[leaf], chosen)
        home = unit if unit is not None else _largest_free(homes[leaf], chosen)
        draft = drafts.setdefault(home, _Draft([home], [], 0, unit is None and bool(home)))
        draft.leaves.append(leaf)
        draft.size += sizes[leaf]
    return tuple(
        UnitSpec("+".join(d.modules), tuple(d.modules), tuple(d.leaves))
        for d in _join(list(drafts.values()))
    )


def choose_modules(
    model: nn.Module,
    rule: Units | bool,
    units: Sequence[UnitSpec],
    *,
    what: str,
    innermost: bool = False,
) -> frozenset[str]:
    """The modules of units that an option is for: those the rule matches; with True all without
    another unit inside.

    An option for the `innermost` ones refuses others.
    """
    if rule is False or rule is None:
        return frozenset()
    entered = {path for unit in units for path in unit.modules}
    around = {parent for path in entered for parent in ancestors(path)[1:]}
    if rule is True:
        return frozenset(entered - around)
    chosen = {path for path in entered if matches(rule, model, path, model.get_submodule(path))}
    if not chosen:
        raise ValueError(
            f"{what}={rule!r} matches no module that is a unit. Remedy: choose among "
            f"{', '.join(sorted(entered))}"
        )
    if innermost and chosen & around:
        raise ValueError(
            f"{what}={rule!r} matches {min(chosen & around) or 'the model'!r}, which has other "
            "units inside: their collectives would be inside too. Remedy: choose among "
            f"{', '.join(sorted(entered - around))}"
        )
    return frozenset(chosen)


def matches(units: Units, model: nn.Module, path: str, module: nn.Module) -> bool:
    """Whether a rule, or any of several, names the module of this path."""
    if units is None:
        return _is_opened_child(model, path)
    if isinstance(units, type):
        return isinstance(module, units)
    if isinstance(units, str):
        return path_matches(path, units)
    if callable(units):
        return bool(units(path, module))
    return any(matches(rule, model, path, module) for rule in units)


def _is_opened_child(model: nn.Module, path: str) -> bool:
    """Whether only containers lie between the model and this module, which is not one itself."""
    container = nn.ModuleList | nn.ModuleDict | nn.Sequential
    parents = path.split(".")[:-1]
    between = [model.get_submodule(".".join(parents[:i])) for i in range(1, len(parents) + 1)]
    return all(isinstance(m, container) for m in between) and not isinstance(
        model.get_submodule(path), container
    )


def _innermost(path: str, chosen: set[str]) -> str | None:
    return next((p for p in ancestors(path) if p in chosen), None)


def _largest_free(path: str, chosen: set[str]) -> str:
    """The outermost module around `path`, short of the root, that has no chosen unit in it; else
    `path` itself."""
    for candidate in reversed(ancestors(path)):
        if candidate and not any(c == candidate or c.startswith(candidate + ".") for c in chosen):
            return candidate
    return path


def _common_parent(a: str, b: str) -> str:
    return next(p for p in ancestors(a) if p in ancestors(b))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _join(drafts: list[_Draft]) -> list[_Draft]:
    """Small units that nobody chose join the next one of their parent that nobody chose, else the
    one before."""
    joined: list[_Draft] = []
    for draft in drafts:
        before = joined[-1] if joined else None
        if (
            before
            and _siblings(before, draft)
            and min(before.size, draft.size) * SMALL <= max(before.size, draft.size)
        ):
            before.modules += draft.modules
            before.leaves += draft.leaves
            before.size += draft.size
        else:
            joined.append(draft)
    return joined


def _siblings(a: _Draft, b: _Draft) -> bool:
    return a.joinable and b.joinable and _parent(a.modules[-1]) == _parent(b.modules[0])
