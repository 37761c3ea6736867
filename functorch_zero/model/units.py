"""The units of a model: leaves that are gathered together, chosen once, by `functionalize`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..params import UnitSpec
from ..tree import PATTERNS, ancestors, path_matches
from .repeated import around, opened, parent_of, repeated_modules, runs
from .slots import Slot

UnitRule = type[nn.Module] | Callable[[str, nn.Module], bool] | str
Units = UnitRule | Sequence[UnitRule] | None

# Why there is a unit, where none were chosen
_CHILD, _REST = "children of the model", "the rest"
SMALL = 8  # a unit of less than 1/SMALL of its neighbour's elements joins it


@dataclass
class _Draft:
    """A unit in the making."""

    modules: list[str]  # paths
    leaves: list[str]  # paths
    num_elements: int  # in all leaves together
    joinable: bool  # nobody chose it, and it isn't the model itself
    why: str  # as in UnitSpec


def find_units(model: nn.Module, units: Units, slots: Iterable[Slot]) -> tuple[UnitSpec, ...]:
    """Partition the model's leaves into units.

    Args:
        model: whose leaves they are.
        units: a module class, a predicate `(path, module)`, a pattern of paths ("blocks.*";
            "**" is any number of names), or several of them. None: each child of the model, with
            containers (ModuleList, Sequential, ModuleDict) opened; of a child around repeated
            modules, these.
        slots: every place where a parameter is used; a tied one has several.

    A leaf belongs to the innermost unit around all its places. Leaves in none of the chosen units
    form units of their own, one for each largest module that holds no chosen one; small ones join a
    neighbour.
    """
    # The model itself is "", and never chosen: its own leaves are the root's unit
    reasons: dict[str, str] = {}  # of the chosen modules, by path
    if units is None:
        reasons = _found(model)
    else:
        for path, module in model.named_modules():
            if path and matches(units, path, module):
                reasons[path] = ""
    chosen = reasons.keys()
    if units is not None and not chosen:
        raise ValueError(
            f"units={units!r} matches no module of {type(model).__name__}. Remedy: see its "
            f"named_modules() for the paths; {PATTERNS}"
        )
    # The innermost module around all places of each leaf
    homes: dict[str, str] = {}
    for slot in slots:
        home = homes.setdefault(slot.leaf, slot.module)
        homes[slot.leaf] = _common_parent(home, slot.module)
    idle = {path for path, module in model.named_modules() if not runs(module)}

    drafts: dict[str, _Draft] = {}  # by the path of their module, in the order of their leaves
    # The chosen modules and all around them, and those that no call would enter
    taken = set(idle)
    for path in chosen:
        taken.update(ancestors(path))
    for leaf, param in model.named_parameters():
        # In a chosen unit, or else in a group that this module shares with no chosen one
        unit = next((path for path in ancestors(homes[leaf]) if path in chosen), None)
        home = _largest_free(homes[leaf], taken, idle) if unit is None else unit
        if home not in drafts:
            # The root's own leaves are no child's, so no neighbour takes them
            joinable = unit is None and home != ""
            rest = _REST if units is None else ""
            drafts[home] = _Draft([home], [], 0, joinable, reasons.get(home, rest))
        drafts[home].leaves.append(leaf)
        drafts[home].num_elements += param.numel()

    found = []
    for draft in _join(list(drafts.values())):
        name = "+".join(draft.modules)  # "norm+head"
        leaves = tuple(draft.leaves)
        found.append(UnitSpec(name, tuple(draft.modules), leaves, why=draft.why))
    return tuple(found)


def choose_modules(
    model: nn.Module,
    rule: Units | bool,
    units: Sequence[UnitSpec],
    *,
    what: str,
    innermost: bool = False,
) -> frozenset[str]:
    """The paths of the units' modules that an option is for.

    Args:
        model: whose modules they are.
        rule: as for units; True: all that have no other unit inside; False or None: none.
        units: the model's.
        what: the option's name, for errors.
        innermost: whether the option is only for modules without another unit inside.
    """
    if rule is False or rule is None:
        return frozenset()
    # A module may enter a unit, have others inside of it, or both
    entered = {path for unit in units for path in unit.modules}
    outer = around(entered)
    without_units = entered - outer  # no other unit inside
    if rule is True:
        return frozenset(without_units)

    # Any unit's module may be recomputed; what must be innermost is checked below
    chosen = {path for path in entered if matches(rule, path, model.get_submodule(path))}
    if not chosen:
        raise ValueError(
            f"{what}={rule!r} matches no module that is a unit. Remedy: choose among "
            f"{_listed(entered)}; {PATTERNS}"
        )
    if innermost and chosen & outer:
        first = min(chosen & outer) or "the model"
        raise ValueError(
            f"{what}={rule!r} matches {first!r}, which has other units inside: their collectives "
            f"would be inside too. Remedy: choose among {_listed(without_units)}"
        )
    return frozenset(chosen)


def matches(rules: UnitRule | Sequence[UnitRule], path: str, module: nn.Module) -> bool:
    """Whether a rule, or any of several, names the module of this path."""
    if isinstance(rules, type):
        return isinstance(module, rules)
    if isinstance(rules, str):
        return path_matches(path, rules)
    if callable(rules):
        return bool(rules(path, module))
    return any(matches(rule, path, module) for rule in rules)


def _found(model: nn.Module) -> dict[str, str]:
    """The modules that are units where none are chosen: path -> why."""
    reasons = repeated_modules(model)
    outer, containers = around(reasons), opened(model)
    for path, _ in model.named_modules():
        if path not in containers and parent_of(path) in containers and path not in outer:
            reasons.setdefault(path, _CHILD)
    return reasons


def _largest_free(path: str, taken: Container[str], idle: Container[str]) -> str:
    """The outermost module around `path`, short of the root, that is not taken; else the innermost
    that runs.

    Args:
        path: of the module that holds a leaf.
        taken: the modules that can't be its unit, or have chosen ones inside.
        idle: the modules that no call would enter.
    """
    # From the root inwards, so that the largest comes first
    for candidate in reversed(ancestors(path)):
        if candidate and candidate not in taken:
            return candidate
    # Every module around it has a chosen unit inside, so it stands alone
    return next((candidate for candidate in ancestors(path) if candidate not in idle), "")


def _common_parent(a: str, b: str) -> str:
    """The innermost module around both; the model at the latest."""
    around_b = ancestors(b)
    return next(path for path in ancestors(a) if path in around_b)


def _join(drafts: list[_Draft]) -> list[_Draft]:
    """Each unit joins the one before it, where both may be one unit and either is small."""
    joined: list[_Draft] = []
    # In order, so that a small unit joins the one registered before it
    for draft in drafts:
        if joined and _are_neighbours(joined[-1], draft) and _one_is_small(joined[-1], draft):
            joined[-1].modules += draft.modules
            joined[-1].leaves += draft.leaves
            joined[-1].num_elements += draft.num_elements
        else:
            joined.append(draft)
    return joined


def _are_neighbours(a: _Draft, b: _Draft) -> bool:
    """Whether two units in a row may be one: nobody chose either, and they have one parent."""
    return a.joinable and b.joinable and parent_of(a.modules[-1]) == parent_of(b.modules[0])


def _one_is_small(a: _Draft, b: _Draft) -> bool:
    """Whether one of two is so small that a gather of its own doesn't pay."""
    smaller, larger = sorted((a.num_elements, b.num_elements))
    return smaller * SMALL <= larger


def _listed(names: set[str]) -> str:
    """Modules' paths for an error. The model's own is empty, which would not show."""
    return ", ".join(name or '"" (the root)' for name in sorted(names))
