"""`OperatorWatch`: sees each operator of a transform, and refuses those that are not elementwise.

Updates and params are tainted, and so is whatever an operator makes of something tainted, storage
by storage. Hyperparameters, step counts and `across`'s answers are not, and may be used at will. An
elementwise operator may still bring elements of different positions together (`u * u[0]`): such is
found by its numbers, in `cuts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._torch_private import QuickDispatchMode, storage_id, version_of, written_of
from ...errors import TransformError, users_line
from ...layout.operators import Kind, kind_of
from ...tree import named_leaves, tensors_among
from ..across import Tree

# Ways to a tensor's values or address that run no operator
HOST_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Moving elements only, or updating each, though neither tagged nor a view by their schema
_MOVES = {
    "_fused_adagrad_",
    "_fused_adam_",
    "_fused_adamw_",
    "_fused_sgd_",
    "_reshape_alias",
    "_unsafe_view",
    "cat",
    "stack",
}
# Raised by operators on shapes and dtypes that they don't take
_FAILURES = (RuntimeError, IndexError, TypeError, ArithmeticError)


class OperatorWatch(QuickDispatchMode):
    """Watches the runs of one transform, of this name, and refuses its unfit operators: below
    autograd and composite functions, so these are ATen's own."""

    def __init__(self, name: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        # Storages of values of leaves, by id; kept alive, so that an id stays theirs
        self._tainted: dict[int, Any] = {}
        # The inputs of the function that runs: by name, and by storage with its version
        self._given: dict[str, Tree] = {}
        self._inputs: dict[int, tuple[Tensor, int]] = {}
        # Whether a function runs now, and whether nothing is to be looked at
        self._runs, self._paused = False, False

    @contextmanager
    def running(self, on: str, *, operators: bool = True, **given: Tree) -> Iterator[None]:
        """Watch the operators that run inside.

        Args:
            on: the kind of leaves, for errors.
            operators: whether to look at each of them; else at the inputs afterwards only.
            given: to `init` or `update`: `params`, or `updates`, `state` and `params`.
        """
        self._given, self._inputs = given, {}
        # Versions tell of a write afterwards, whichever way it was made
        for x in tensors_among(optree.tree_leaves(given)):
            self._inputs[storage_id(x)] = x, version_of(x)
        if operators:
            # The state needs none: tensors made of leaves in earlier runs still are
            self._taint(optree.tree_leaves([given["params"], given.get("updates")]))
        phase = "update" if "updates" in given else "init"
        # The first run is watched. One that fails only later does so because its leaves are cut
        # otherwise, or at a later step, whatever the error
        failures = _FAILURES if operators else (Exception,)
        self._runs = True
        try:
            with ExitStack() as stack:
                if operators:
                    stack.enter_context(_Functions(self))
                    stack.enter_context(self)
                yield
        except TransformError as error:
            if self.name in str(error):  # this watch's own
                raise
            # An `across` refused, and doesn't know whose question it was
            raise TransformError(f"{self.name}: {error}") from error
        except NotImplementedError:  # a known limit, of meta tensors, say
            raise
        except failures as error:
            raise TransformError(
                f"the {phase} of {self.name} fails on {on}: {type(error).__name__}: {error}. "
                "Remedy: use only elementwise operators on leaves, which may be empty, and "
                "optim.masked or across.extents (optim.with_statistics) where shapes matter"
            ) from error
        finally:
            self._runs = False
        # Also where no operator was watched, and for data that was swapped
        for key, (x, version) in self._inputs.items():
            if storage_id(x) != key or version_of(x) != version:
                self._refuse_change(key, "by an operator that is not watched")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let everything pass inside; no result is tainted there."""
        # Nested pauses: an answer may be made of other answers
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        # Refusals come before the operator runs, so nothing is changed by then
        kind = kind_of(func)
        if kind.is_random:
            remedy = (
                "across.normal(updates, seed=seed, step=count), or across.uniform or .rademacher, "
                "with a count in the state (optim.with_statistics)"
            )
            self.refuse(f"runs {func}, which draws random numbers", remedy)
        written = written_of(func, args, kwargs)
        for x in tensors_among(*written):
            self._refuse_change(storage_id(x), f"by {func}")
        given = tensors_among(*args, *kwargs.values())
        # One tainted operand is enough: the result depends on values of leaves
        tainted = next((x for x in given if storage_id(x) in self._tainted), None)
        if tainted is not None:
            # `item`, `nonzero`, indexing by a tensor: values reach the host, or decide a shape
            if kind.reads_values:
                self._refuse_reading(str(func))
            if not (_keeps_elements(func, kind) or _fills_a_mask(func, args)):
                shape = tuple(tainted.shape)
                self.refuse(
                    f"runs {func} on values of leaves, of shape {shape}: that operator is not "
                    "elementwise",
                    "ask `across` for what concerns more than one element "
                    "(optim.with_statistics), or take whole leaves (optim.with_whole_leaves)",
                )
        out = func(*args, **kwargs)
        if tainted is not None and not (kind.makes_new or kind.makes_like):
            self._taint(written, out)
        return out

    def see_function(self, func: Any, x: Tensor) -> None:
        """Refuse to hand values to Python or numpy, and to swap an input's data."""
        if self._paused:
            return
        # Numbers that are not made of leaves may be read: counts are the same on all ranks
        if func in HOST_READS and storage_id(x) in self._tainted:
            self._refuse_reading(f"Tensor.{func.__name__}")
        if func == _SET_DATA:
            self._refuse_change(storage_id(x), "by setting .data")

    def _taint(self, *made: Any) -> None:
        self._tainted |= {storage_id(x): x.untyped_storage() for x in tensors_among(*made)}

    def _refuse_change(self, key: int, how: str) -> None:
        """Refuse to change the input in this storage, if there is one."""
        if key not in self._inputs:
            return
        # Found by identity, for its path in the error
        changed, _ = self._inputs[key]
        for name, tree in self._given.items():
            for path, x in named_leaves(tree).items():
                if x is changed:
                    story = f"changes its input in place {how}: {name} of leaf {path or '(root)'}"
                    self.refuse(story, "return new tensors")

    def _refuse_reading(self, how: str) -> NoReturn:
        self.refuse(
            f"reads values of leaves on the host by {how}, and other ranks hold other values",
            "use torch.where, or ask `across`",
        )

    def refuse(self, story: str, remedy: str) -> NoReturn:
        """Raise a `TransformError` that names the transform and, in a run, the author's line."""
        # Outside a run the innermost frame would be one of ours
        line = users_line() if self._runs else ""
        raise TransformError(f"{self.name} {story}{line}. Remedy: {remedy}")


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: OperatorWatch):
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            self._watcher.see_function(func, x)
        return func(*args, **kwargs)


def _keeps_elements(func: Any, kind: Kind) -> bool:
    """Whether an operator is elementwise, or moves elements only."""
    moves = func.is_view or func.overloadpacket.__name__ in _MOVES
    return kind.is_pointwise or kind.makes_new or kind.makes_like or moves


def _fills_a_mask(func: Any, args: Sequence[Any]) -> bool:
    """Whether this is `x[mask] = number`, with a mask of each element."""
    if func.overloadpacket.__name__ not in ("index_put", "index_put_"):
        return False
    x, indices, value = args[:3]
    (mask, *others) = indices
    is_mask = mask is not None and mask.dtype == torch.bool and mask.shape == x.shape
    return is_mask and not others and value.numel() == 1
