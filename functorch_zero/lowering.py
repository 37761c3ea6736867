"""What the loss of an unsharded step sees of params whose policy says to use them in another dtype: handles.

Entering a unit casts its leaves: forward rounds them as the gather of a sharded step would, backward rounds their
gradients as its reduction would. This is all that a `Precision` does to the arithmetic of the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, repeat
from typing import Any

import optree
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .handle import check_unchanged, make_handles, versions_of
from .params import Params, UnitSpec
from .precision import Dtypes
from .tree import PyTree


def lower(leaf: Tensor, dtypes: Dtypes | None) -> Tensor:
    """A stored leaf as a module computes with it; differentiable by whatever differentiates torch's operators."""
    return leaf if dtypes is None else leaf.to(dtypes.gather).to(dtypes.compute)


class Lower(torch.autograd.Function):
    """Forward: a stored leaf as a module computes with it. Backward: its gradient, rounded as reductions are."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, dtypes: Dtypes) -> Tensor:
        ctx.dtypes, ctx.storage = dtypes, leaf.dtype
        made = lower(leaf, dtypes)
        return made.view_as(made) if made is leaf else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtypes.reduce).to(ctx.storage), None


class LoweredUnit:
    """One unit in one call of a loss: the `Entrance` of its leaves' handles. It is entered as a sharded one is."""

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
            with temporarily_clear_interpreter_stack():
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
        return Lower.apply(leaf, dtypes) if leaf.requires_grad else lower(leaf, dtypes)  # type: ignore[no-untyped-call]


class Seen:
    """What a loss sees of params: `params`, themselves where no policy says otherwise."""

    def __init__(self, params: PyTree[Tensor]):
        self._units: list[LoweredUnit] = []
        self.params = optree.tree_map(
            lambda node: self._handles(node) if isinstance(node, Params) else node,
            params,
            is_leaf=lambda node: isinstance(node, Params),
        )

    def _handles(self, params: Params) -> Params:
        seen = dict(params)
        for unit in params.units:
            stored = [params[path] for path in unit.leaves]
            dtypes = [policy.dtypes(params[path].dtype) for path, policy in unit.policies.items()]
            if any(found is not None for found in dtypes):
                entrance = LoweredUnit(unit, stored, dtypes)
                self._units.append(entrance)
                used = [leaf.dtype if d is None else d.compute for leaf, d in zip(stored, dtypes, strict=True)]
                shapes, trained = [leaf.shape for leaf in stored], [leaf.requires_grad for leaf in stored]
                devices = [leaf.device for leaf in stored]
                handles = make_handles(repeat(entrance), count(), shapes, used, devices, trained)
                seen |= dict(zip(unit.leaves, handles, strict=True))
        return Params(seen, params.units)

    def finish(self) -> None:
        """The loss has returned."""
        for unit in self._units:
            unit.close()
