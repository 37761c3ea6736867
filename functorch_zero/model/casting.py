"""Mixed precision: the policy of each module, casts around its calls, and lazy parameters that are
cast when their unit is entered.

Entering a unit of an unsharded step casts its leaves: forward rounds them as the gather of a
sharded step would, backward rounds their gradients as its reduction would. This is all that a
`Precision` does to the arithmetic of the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import optree
import torch
from torch import Tensor, nn

from .._torch_private import map_tensors, outside_transforms
from ..errors import StructureError, explain
from ..params import Params, UnitSpec
from ..precision import Dtypes, Precision
from ..tree import PyTree, ancestors
from .lazy_param import check_unchanged, make_lazy_params, versions_of
from .slots import Slot
from .units import UnitRule, matches

PrecisionRules = Precision | Mapping[UnitRule, Precision] | None

# Never called: their parent uses them
_HOLDERS = nn.ParameterList | nn.ParameterDict | nn.ModuleList | nn.ModuleDict


@dataclass(frozen=True)
class Policies:
    """The policies of a model: by the path of each module that was given one, which counts for all
    that is in it."""

    given: Mapping[str, Precision]

    def of(self, module: str) -> Precision:
        """The policy of the module of this path: that of the innermost module around it that was
        given one."""
        return next(
            (self.given[path] for path in ancestors(module) if path in self.given), Precision()
        )

    def of_leaves(self, slots: Iterable[Slot]) -> dict[str, Precision]:
        """The policy of each leaf, from every place that one is used in."""
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
        """Make the modules of a model (a copy that is nobody else's) cast what they are given and
        what they return."""
        holders = {
            _holder(root, path)
            for path, m in root.named_modules()
            if any(True for _ in m.parameters(recurse=False))
        }
        for path, module in root.named_modules():
            inputs = self.of(path).compute if path in holders else None
            output = self.given[path].output if path in self.given else None
            if inputs is not None or output is not None:
                module.forward = _casting(module.forward, inputs, output)


def find_policies(model: nn.Module, rules: PrecisionRules) -> Policies:
    """Read the rules: one policy for the model, or policies by module classes, predicates, or
    patterns of paths."""
    by_rule = rules if isinstance(rules, Mapping) else {} if rules is None else {"": rules}
    given: dict[str, Precision] = {}
    for rule, policy in by_rule.items():
        if not isinstance(policy, Precision):
            raise TypeError(
                f"precision takes Precision, or a mapping to it; got {type(policy).__name__} for "
                f"{rule!r}"
            )
        found = [
            path for path, module in model.named_modules() if _names(rule, model, path, module)
        ]
        if not found:
            raise ValueError(
                f"precision={{{rule!r}: ...}} matches no module of {type(model).__name__}"
            )
        given |= dict.fromkeys(found, policy)
    return Policies(given)


def _names(rule: UnitRule, model: nn.Module, path: str, module: nn.Module) -> bool:
    """As a rule for units does; the model itself goes by the pattern "" only, not by "*"."""
    return (
        rule == path
        if isinstance(rule, str) and "" in (rule, path)
        else matches(rule, model, path, module)
    )


def _holder(root: nn.Module, path: str) -> str:
    """The path of the module in whose call the leaves of this one are used."""
    return next((p for p in ancestors(path) if not isinstance(root.get_submodule(p), _HOLDERS)), "")


def _casting(
    forward: Callable[..., Any], inputs: torch.dtype | None, output: torch.dtype | None
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        if inputs is not None:
            args, kwargs = cast_floats((args, kwargs), inputs)
        return cast_floats(forward(*args, **kwargs), output)

    return cast_and_run


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """The same tree (torch's registry, so that Hugging Face's outputs are trees) with
    floating-point tensors cast."""
    if dtype is None:
        return tree
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def cast_leaf(leaf: Tensor, dtypes: Dtypes | None) -> Tensor:
    """A stored leaf as a module computes with it; differentiable by whatever differentiates torch's
    operators."""
    return leaf if dtypes is None else leaf.to(dtypes.gather).to(dtypes.compute)


class CastLeaf(torch.autograd.Function):
    """Forward: a stored leaf as a module computes with it. Backward: its gradient, rounded as
    reductions are."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, dtypes: Dtypes) -> Tensor:
        ctx.dtypes, ctx.storage = dtypes, leaf.dtype
        made = cast_leaf(leaf, dtypes)
        return made.view_as(made) if made is leaf else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtypes.reduce).to(ctx.storage), None


class CastUnit:
    """One unit in one call of a loss: the `Entrance` of its leaves' lazy parameters. It is entered
    as a sharded one is."""

    def __init__(self, unit: UnitSpec, stored: Sequence[Tensor], dtypes: Sequence[Dtypes | None]):
        self._modules = set(unit.modules)
        self._stored, self._dtypes = stored, dtypes
        self._leaves: list[Tensor] | None = None
        self._versions: list[int] = []
        self._tracked = False
        self._left: set[str] = set()
        self._depth = 0

    def enter(self, module: str) -> Sequence[Tensor]:
        if self._depth == 0 and module in self._left:
            self.close()
        leaves = self.touch()
        self._depth += 1
        return leaves

    def leave(self, module: str) -> None:
        self._depth -= 1
        self._left.add(module)
        if self._depth == 0 and self._left >= self._modules:
            self.close()

    def touch(self) -> Sequence[Tensor]:
        tracked = torch.is_grad_enabled()
        if self._leaves is None or (tracked and not self._tracked):
            self.close()
            with outside_transforms():
                pairs = zip(self._stored, self._dtypes, strict=True)
                self._leaves = [self._lowered(leaf, dtypes) for leaf, dtypes in pairs]
            self._versions = versions_of(self._leaves)
            self._tracked, self._left = tracked, set()
        return self._leaves

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Let go of the leaves made at the last entry."""
        check_unchanged(self._leaves or [], self._versions)
        self._leaves = None

    def _lowered(self, leaf: Tensor, dtypes: Dtypes | None) -> Tensor:
        if dtypes is None:
            return leaf.view_as(leaf)
        return CastLeaf.apply(leaf, dtypes) if leaf.requires_grad else cast_leaf(leaf, dtypes)  # type: ignore[no-untyped-call]


class CastParams:
    """What a loss sees of params: `params`, themselves where no policy says otherwise."""

    def __init__(self, params: PyTree[Tensor]):
        self._units: list[CastUnit] = []
        self.params = optree.tree_map(
            lambda node: self._lazy_params(node) if isinstance(node, Params) else node,
            params,
            is_leaf=lambda node: isinstance(node, Params),
        )

    def _lazy_params(self, params: Params) -> Params:
        seen = dict(params)
        for unit in params.units:
            stored = [params[path] for path in unit.leaves]
            dtypes = [policy.dtypes(params[path].dtype) for path, policy in unit.policies.items()]
            if any(found is not None for found in dtypes):
                entrance = CastUnit(unit, stored, dtypes)
                self._units.append(entrance)
                used = [
                    leaf.dtype if d is None else d.compute
                    for leaf, d in zip(stored, dtypes, strict=True)
                ]
                shapes, trained = (
                    [leaf.shape for leaf in stored],
                    [leaf.requires_grad for leaf in stored],
                )
                devices = [leaf.device for leaf in stored]
                lazy = make_lazy_params(repeat(entrance), count(), shapes, used, devices, trained)
                seen |= dict(zip(unit.leaves, lazy, strict=True))
        return Params(seen, params.units)

    def finish(self) -> None:
        """The loss has returned."""
        for unit in self._units:
            unit.close()
