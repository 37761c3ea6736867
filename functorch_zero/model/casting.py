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
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor, nn

from .._torch_private import map_tensors, transforms_active
from ..compress import dtype_of, rounded
from ..errors import StructureError
from ..params import Params, UnitSpec
from ..precision import Dtypes, Precision
from ..tree import PATTERNS, PyTree, ancestors
from .lazy_param import LazyParam, handed_out, make_lazy_param, outside_modes
from .slots import Slot
from .units import UnitRule, matches
from .untouched import Untouched

PrecisionRules = Precision | Mapping[UnitRule, Precision] | None

# They have no call of their own: the module around them uses their leaves
_CONTAINERS = nn.ParameterList | nn.ParameterDict | nn.ModuleList | nn.ModuleDict


@dataclass(frozen=True)
class Policies:
    """The policies of a model. One that a module was given counts for everything inside it."""

    given: Mapping[str, Precision]  # by the path of each module that was given one

    def of(self, module: str) -> Precision:
        """The policy of the module of this path: that of the innermost module around it that was
        given one."""
        for path in ancestors(module):  # from the innermost outwards
            if path in self.given:
                return self.given[path]
        return Precision()

    def of_leaves(self, slots: Iterable[Slot], *, buffers: bool = False) -> dict[str, Precision]:
        """The policy of each leaf, from every place that one is used in; of buffers, the part that
        is about them."""
        found: dict[str, Precision] = {}
        for slot in slots:
            # A tied leaf is one tensor, and can't be cast in two ways
            policy = self.of(slot.module)
            policy = Precision(buffers=policy.buffers) if buffers else policy
            if found.setdefault(slot.leaf, policy) != policy:
                what = "a buffer" if buffers else "a leaf"
                raise StructureError(
                    f"{what} that several modules share would have two policies",
                    path=slot.leaf,
                    expected=found[slot.leaf],
                    got=f"{policy} at {slot.module or 'the model'}",
                    remedy="give all modules that use it the same policy",
                )
        return found

    def cast_calls(self, root: nn.Module) -> None:
        """Make the modules of a model cast their inputs, where they use leaves, and their outputs,
        where a policy says so. The model is a copy that is nobody else's.

        The leaves of a ParameterList or its like are used by the module around it.
        """
        users = set()  # modules in whose calls leaves are used
        for path, module in root.named_modules():
            # Its own leaves, not those of modules inside
            if next(module.parameters(recurse=False), None) is not None:
                users.add(_calling_module(root, path))
        for path, module in root.named_modules():
            inputs = self.of(path).compute if path in users else None
            # The output's dtype is that of the module named alone, not of those inside it
            output = self.given[path].output if path in self.given else None
            if inputs is not None or output is not None:
                module.forward = _casting(module.forward, inputs, output)


def find_policies(model: nn.Module, rules: PrecisionRules) -> Policies:
    """Read the rules: one policy for the model, or policies by module classes, predicates, or
    patterns of paths."""
    if rules is None:
        return Policies({})
    # One policy for all is one for the model, ""
    by_rule = rules if isinstance(rules, Mapping) else {"": rules}
    given: dict[str, Precision] = {}
    for rule, policy in by_rule.items():
        if not isinstance(policy, Precision):
            raise TypeError(
                f"precision takes Precision, or a mapping to it; got {type(policy).__name__} for "
                f"{rule!r}. Remedy: fz.Precision(compute=torch.bfloat16), say"
            )
        named = [path for path, module in model.named_modules() if _names(rule, path, module)]
        if not named:
            raise ValueError(
                f"precision={{{rule!r}: ...}} matches no module of {type(model).__name__}. "
                f"Remedy: see its named_modules() for the paths; {PATTERNS}"
            )
        given |= dict.fromkeys(named, policy)  # of two rules for a module the later one counts
    return Policies(given)


def _names(rule: UnitRule, path: str, module: nn.Module) -> bool:
    """Whether a rule names a module, as rules for units do. But the model itself, whose path is "",
    goes by the pattern "" only: "*" is for its children."""
    if isinstance(rule, str) and "" in (rule, path):
        return rule == path
    return matches(rule, path, module)


def _calling_module(root: nn.Module, path: str) -> str:
    """The path of the module in whose call the leaves of this one are used."""
    for candidate in ancestors(path):
        if not isinstance(root.get_submodule(candidate), _CONTAINERS):
            return candidate
    return ""


def _casting(
    forward: Callable[..., Any], inputs: torch.dtype | None, output: torch.dtype | None
) -> Callable[..., Any]:
    """A forward with casts before and after it; None: no cast."""

    @functools.wraps(forward)
    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        if inputs is not None:
            args = tuple([cast_floats(x, inputs) for x in args])
            kwargs = {name: cast_floats(x, inputs) for name, x in kwargs.items()}
        return cast_floats(forward(*args, **kwargs), output)

    return cast_and_run


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """A tree with its floating-point tensors cast; None: as they are.

    Trees are those of torch's registry, which has Hugging Face's outputs too.
    """
    if dtype is None:
        return tree

    # Integers are indices or masks: they stay
    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    # Most often a tensor: torch's walk through a tree takes ten times as long
    return cast(tree) if isinstance(tree, Tensor) else map_tensors(cast, tree)


def cast_leaf(leaf: Tensor, dtypes: Dtypes | None) -> Tensor:
    """A stored leaf as a module computes with it; differentiable by whatever differentiates torch's
    operators."""
    if dtypes is None:
        return leaf
    # Rounded twice, as by a sharded step, which gathers in one dtype and computes in another
    return rounded(leaf, dtypes.gather).to(dtypes.compute)


def as_used(leaf: Tensor, dtypes: Dtypes | None) -> Tensor:
    """`cast_leaf`. The gradient of a leaf of autograd's graph is rounded as reductions are, another
    way than the cast's own would be."""
    if dtypes is not None and leaf.is_leaf and leaf.requires_grad and not transforms_active():
        cast: Tensor = CastLeaf.apply(leaf, dtypes)  # type: ignore[no-untyped-call]
        return cast
    return cast_leaf(leaf, dtypes)


def as_reduced(
    grads: PyTree[Tensor], params: PyTree[Tensor], wanted: PyTree[bool]
) -> PyTree[Tensor]:
    """Gradients of stored leaves (None where frozen), those wanted rounded as before the sum over
    ranks."""

    def of_node(node: Any, own: Any, wanted: Any) -> Any:
        if not isinstance(node, Params):
            return own
        found = dict(own)
        for unit in node.units:
            for path, policy in unit.policies.items():
                dtypes, grad = policy.dtypes(node[path].dtype), own[path]
                if grad is not None and dtypes is not None and wanted[path]:
                    found[path] = _as_reduced(grad, dtypes, grad.dtype)
        return Params(found, own.units, own.names)

    return optree.tree_map(of_node, params, grads, wanted, is_leaf=_is_params)


def _as_reduced(grad: Tensor, dtypes: Dtypes, storage: torch.dtype) -> Tensor:
    """A gradient, rounded as before the sum over ranks, then as the optimizer is given it."""
    if grad.layout != torch.strided:
        # As on ranks: the parts of a row are one number before it is rounded, and a codec's blocks
        # go over rows
        grad = grad.coalesce() if isinstance(dtypes.reduce, torch.dtype) else grad.to_dense()
    return rounded(grad.to(dtype_of(dtypes.reduce, storage)), dtypes.reduce).to(storage)


class CastLeaf(torch.autograd.Function):
    """Forward: a stored leaf as a module computes with it. Backward: its gradient, rounded as
    reductions are."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, dtypes: Dtypes) -> Tensor:
        ctx.dtypes = dtypes
        ctx.storage = leaf.dtype
        cast = cast_leaf(leaf, dtypes)
        # A tensor of its own even where nothing is rounded, so that the loss never has the master
        return cast.view_as(cast) if cast is leaf else cast

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _as_reduced(grad, ctx.dtypes, ctx.storage), None


class CastUnit:
    """One unit in one call of a loss: the `Entrance` of its leaves' lazy parameters.

    It is entered as a sharded one is, and its leaves are cast at the moments at which those of a
    sharded one are gathered. So each use has leaves of its own, whose gradients are rounded before
    they are added.
    """

    def __init__(
        self,
        unit: UnitSpec,
        stored: Sequence[Tensor],
        dtypes: Sequence[Dtypes | None],
        *,
        look: bool,
    ):
        self._unit = unit
        self._look = look  # whether the values of leaves are compared after a use
        self._stored = stored  # the unit's leaves, whole, in their storage dtypes
        self._dtypes = dtypes  # of each leaf; None: used as it is stored
        self._leaves: list[Tensor] | None = None  # as cast at the last entry
        self._untouched = Untouched([], look=False)  # those, which the loss must not write to
        self._tracked = False  # whether they were cast with gradients
        self._left: set[str] = set()  # the modules whose calls have returned since then
        self._depth = 0  # calls under way, one in another

    def enter(self, module: str) -> Sequence[Tensor]:
        # Called again from outside: another use of the unit, with gradients of its own
        if self._depth == 0 and module in self._left:
            self.close()
        leaves = self.touch()
        self._depth += 1
        return leaves

    def leave(self, module: str) -> None:
        self._depth -= 1
        self._left.add(module)
        if self._depth == 0 and self._left.issuperset(self._unit.modules):
            self.close()

    def touch(self) -> Sequence[Tensor]:
        tracked = torch.is_grad_enabled()
        # Leaves cast without gradients won't do where gradients are wanted
        if self._leaves is None or (tracked and not self._tracked):
            self.close()
            with outside_modes():
                # A tensor of this use's own where nothing is cast
                self._leaves = [
                    leaf.view_as(leaf) if dtypes is None else as_used(leaf, dtypes)
                    for leaf, dtypes in zip(self._stored, self._dtypes, strict=True)
                ]
            self._untouched = Untouched(self._leaves, look=self._look)
            self._tracked = tracked
            self._left = set()
        return self._leaves

    def watch(self) -> AbstractContextManager[None]:
        # Nothing is gathered here, so nothing has to be remembered by place
        return nullcontext()

    def grads_of_stored(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the leaves as they were cast -> of those stored, rounded as of a use."""
        return [
            grad if grad is None or dtypes is None else _as_reduced(grad, dtypes, leaf.dtype)
            for leaf, dtypes, grad in zip(self._stored, self._dtypes, grads, strict=True)
        ]

    def close(self) -> None:
        """Let go of the leaves made at the last entry; raise if the loss has written to them."""
        self._untouched.check(self._unit.name)
        self._untouched = Untouched([], look=False)
        self._leaves = None


class CastParams:
    """Params as a loss sees them, in `params`: the given ones where no policy says otherwise.

    Call `finish` when the loss has returned.

    Args:
        look: whether the values of cast leaves are compared; see `Untouched`.
        round_sums: the leaves of which the sum of gradients is rounded, by others, in place of each
            use's. None: there are none.
    """

    def __init__(
        self,
        params: PyTree[Tensor],
        *,
        look: bool = False,
        round_sums: PyTree[bool] | None = None,
    ):
        self._look = look
        self._units: list[CastUnit] = []
        trees = (params,) if round_sums is None else (params, round_sums)
        # `Params` are told from plain dicts, as only they know units
        self.params = optree.tree_map(self._seen, *trees, is_leaf=_is_params)

    def _seen(self, node: Any, round_sums: Any = None) -> Any:
        """A model's params with lazy ones in units that are cast; any other leaf as it is."""
        if not isinstance(node, Params):
            return node
        seen = dict(node)  # a plain dict, so that leaves may be replaced
        for unit in node.units:
            seen |= self._lazy_params(unit, node, round_sums or {})
        return Params(seen, node.units)

    def _lazy_params(
        self, unit: UnitSpec, params: Params, round_sums: Mapping[str, bool]
    ) -> dict[str, LazyParam]:
        """The unit's leaves as lazy parameters, by path; empty where none is cast."""
        stored: list[Tensor] = [params[path] for path in unit.policies]
        dtypes = [*map(Precision.dtypes, unit.precisions, [leaf.dtype for leaf in stored])]
        if not any(dtypes):
            return {}
        # Of each use, for `CastUnit`
        of_uses = [
            replace(found, reduce=leaf.dtype) if found and round_sums.get(path) else found
            for path, leaf, found in zip(unit.policies, stored, dtypes, strict=True)
        ]
        entrance = CastUnit(unit, stored, of_uses, look=self._look)
        self._units.append(entrance)
        lazy = [
            make_lazy_param(entrance, number, leaf.shape, leaf.dtype, found, leaf.device)
            for number, (leaf, found) in enumerate(zip(stored, dtypes, strict=True))
        ]
        trainable = [leaf.requires_grad for leaf in stored]
        handed = handed_out(lazy, trainable, stored, entrance.grads_of_stored)
        return dict(zip(unit.leaves, handed, strict=True))

    def finish(self) -> None:
        """Let go of the leaves that were cast, and raise if the loss has written to one."""
        for unit in self._units:
            unit.close()


def _is_params(node: Any) -> bool:
    return isinstance(node, Params)
