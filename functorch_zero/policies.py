"""Which `Precision` each module of a model has, and the casts around modules' calls that follow from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

from .errors import StructureError, explain
from .precision import Precision
from .tree import ancestors
from .units import UnitRule, matches

PrecisionRules = Precision | Mapping[UnitRule, Precision] | None

_HOLDERS = nn.ParameterList | nn.ParameterDict | nn.ModuleList | nn.ModuleDict  # never called: their parent uses them


@dataclass(frozen=True)
class Policies:
    """The policies of a model: by the path of each module that was given one, which counts for all that is in it."""

    given: Mapping[str, Precision]

    def of(self, module: str) -> Precision:
        """The policy of the module of this path: that of the innermost module around it that was given one."""
        return next((self.given[path] for path in ancestors(module) if path in self.given), Precision())

    def of_leaves(self, slots: Iterable[tuple[str, str, str]]) -> dict[str, Precision]:
        """The policy of each leaf, from (module path, attribute, leaf path) of every place that one is used in."""
        found: dict[str, Precision] = {}
        for module, _, leaf in slots:
            policy = self.of(module)
            if found.setdefault(leaf, policy) != policy:
                raise StructureError(
                    explain(
                        "a leaf that several modules share would have two policies",
                        path=leaf,
                        expected=found[leaf],
                        got=f"{policy} at {module or 'the model'}",
                        remedy="give all modules that use it the same policy",
                    )
                )
        return found

    def cast_calls(self, root: nn.Module) -> None:
        """Make the modules of a model (a copy that is nobody else's) cast what they are given and what they return."""
        holders = {
            _holder(root, path)
            for path, m in root.named_modules()
            if any(p is not None for p in m._parameters.values())
        }
        for path, module in root.named_modules():
            inputs = self.of(path).compute if path in holders else None
            output = self.given[path].output if path in self.given else None
            if inputs is not None or output is not None:
                module.forward = _casting(module.forward, inputs, output)


def find_policies(model: nn.Module, rules: PrecisionRules) -> Policies:
    """Read the rules: one policy for the model, or policies by module classes, predicates, or patterns of paths."""
    by_rule = rules if isinstance(rules, Mapping) else {} if rules is None else {"": rules}
    given: dict[str, Precision] = {}
    for rule, policy in by_rule.items():
        if not isinstance(policy, Precision):
            raise TypeError(f"precision takes Precision, or a mapping to it; got {type(policy).__name__} for {rule!r}")
        found = [path for path, module in model.named_modules() if _names(rule, model, path, module)]
        if not found:
            raise ValueError(f"precision={{{rule!r}: ...}} matches no module of {type(model).__name__}")
        given |= dict.fromkeys(found, policy)
    return Policies(given)


def _names(rule: UnitRule, model: nn.Module, path: str, module: nn.Module) -> bool:
    """As a rule for units does; the model itself goes by the pattern "" only, not by "*"."""
    return rule == path if isinstance(rule, str) and "" in (rule, path) else matches(rule, model, path, module)


def _holder(root: nn.Module, path: str) -> str:
    """The path of the module in whose call the leaves of this one are used."""
    return next((p for p in ancestors(path) if not isinstance(root.get_submodule(p), _HOLDERS)), "")


def _casting(forward: Callable[..., Any], inputs: torch.dtype | None, output: torch.dtype | None) -> Callable[..., Any]:
    @functools.wraps(forward)
    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        if inputs is not None:
            args, kwargs = cast_floats((args, kwargs), inputs)
        return cast_floats(forward(*args, **kwargs), output)

    return cast_and_run


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """The same tree (torch's registry, so that Hugging Face's outputs are trees) with floating-point tensors cast."""
    if dtype is None:
        return tree
    return torch_pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
