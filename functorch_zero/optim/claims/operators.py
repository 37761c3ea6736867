"""`Watch`: sees every operator a transform runs on pieces, and refuses those that are not
elementwise.

Note [positions]: each element of updates, params and state that follows a param has a number, its
position. The watch keeps, for every byte of memory, which position it was computed from: an
operator may combine values of one position only, and the results must be at their own positions. So
views, in-place work on temporaries, concatenation and splitting are free, while `u * u[0]` and `u +
u.T` are not. Hyperparameters, step counts and `across`'s answers have no position.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._torch_private import TorchDispatchMode, arguments_of, storage_id, version_of
from ...errors import TransformError
from ...tree import PyTree

_HOST_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_COPIES = {
    "_to_copy",
    "copy_",
    "_foreach_copy_",
    "zero_",
    "fill_",
    "_foreach_zero_",
    "lift_fresh",
    "complex",
    "polar",
}
_VIEWS = {"_unsafe_view", "_reshape_alias"}  # besides those whose schema says so
# What they write they don't read
_OVERWRITES = {
    "copy_",
    "_foreach_copy_",
    "zero_",
    "fill_",
    "_foreach_zero_",
}
_JOINS = {"cat", "stack"}
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm"}
_LIBRARIES = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, optree))


class Positions:
    """For each byte of memory, the position it was computed from, or -1 for none. See Note
    [positions]."""

    def __init__(self) -> None:
        self._shadows: dict[
            int, tuple[Any, Tensor]
        ] = {}  # by storage, which is kept alive so that its key stays its own

    def of(self, x: Tensor) -> Tensor | None:
        """Shaped like `x`, int64; None where no element has a position."""
        known = self._shadows.get(storage_id(x))
        if known is None:
            return None
        size = x.element_size()
        found = known[1].as_strided(
            x.size(), [s * size for s in x.stride()], x.storage_offset() * size
        )
        return found if bool((found >= 0).any()) else None

    def put(self, x: Tensor, positions: Tensor | int) -> None:
        """Say what `x` was computed from; `positions` broadcasts to its shape."""
        key, size = storage_id(x), x.element_size()
        storage = x.untyped_storage()
        if key not in self._shadows or self._shadows[key][1].numel() < storage.nbytes():
            self._shadows[key] = (storage, torch.full((storage.nbytes(),), -1))
        strides = [*(s * size for s in x.stride()), 1]
        shadow = self._shadows[key][1].as_strided(
            [*x.size(), size], strides, x.storage_offset() * size
        )
        shadow.copy_(positions.unsqueeze(-1)) if isinstance(positions, Tensor) else shadow.fill_(
            positions
        )


class Watch:
    """Watches one transform on pieces of a tree.

    Args:
        name: of the transform, for errors.
        leaves: the paths of the tree's leaves.
        width: the most elements that any piece has.
    """

    def __init__(self, name: str, leaves: Sequence[str], width: int):
        self._name, self._leaves, self._width = name, leaves, width
        self._positions = Positions()
        self._inputs: dict[
            int, tuple[Tensor, int, str]
        ] = {}  # by storage: the tensor, its version, what it is
        self._runs, self._paused = False, False

    def give(self, tree: PyTree[Tensor], leaves: Iterable[int | None], what: str) -> None:
        """Say that a tree is the transform's input: each leaf holds a piece of that leaf of params
        (None: of none)."""
        for x, leaf in zip(optree.tree_leaves(tree), leaves, strict=True):
            if not isinstance(x, Tensor):
                continue
            if leaf is not None:
                self._positions.put(x, self._own(x, leaf))
            label = (
                f"{what} (a value that follows no param)"
                if leaf is None
                else f"{what} of leaf {self._path(leaf)}"
            )
            self._inputs[storage_id(x)] = (x, version_of(x), label)

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """Watch what happens inside."""
        self._runs = True
        try:
            with ExitStack() as stack:
                stack.enter_context(_Functions(self))
                stack.enter_context(_Operators(self))
                yield
        except TransformError as error:
            if self._name in str(error):
                raise
            raise TransformError(f"{self._name}: {error}") from error
        except (RuntimeError, IndexError, TypeError, ArithmeticError) as error:
            if isinstance(error, NotImplementedError):
                raise
            raise TransformError(
                f"the {phase} of {self._name} fails on 1-D pieces of leaves, which may be empty: "
                f"{type(error).__name__}: {error}. Remedy: use only elementwise operators on leaves"
            ) from error
        finally:
            self._runs = False
        for key, (x, version, label) in self._inputs.items():
            if storage_id(x) != key or version_of(x) != version:
                self.refuse(f"changes its input in place: {label}", "return new tensors")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let everything pass inside; what is made there has no position."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def check_results(self, tree: PyTree[Any], leaves: Sequence[int | None], what: str) -> None:
        """Refuse results that are not where they belong: each leaf like that piece of params (None:
        like none)."""
        results = optree.tree_leaves(tree)
        if len(results) != len(leaves):
            self.refuse(
                f"returns {what} of {len(results)} leaves where {len(leaves)} are expected",
                "keep the structure",
            )
        for x, leaf in zip(results, leaves, strict=True):
            found = (
                self._positions.of(x) if isinstance(x, Tensor) and x.device.type != "meta" else None
            )
            if found is None:
                continue
            if leaf is None:
                story = f"keeps values of {self._where(x)} in state that follows no param"
                self.refuse(story, "make state of the param's shape in `init`, or ask `across`")
            elif not torch.equal(torch.where(found < 0, own := self._own(x, leaf), found), own):
                story = (
                    f"makes {what} of leaf {self._path(leaf)} from elements of other "
                    f"positions ({self._where(x)})"
                )
                self.refuse(story, "let each result depend on the values at its own position only")

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operator, or refuse it."""
        if self._paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        operands = _operands(func, name, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            remedy = "draw random numbers in a whole-leaf transform, from a seed in its state"
            self.refuse(f"runs {func}, which draws random numbers", remedy)
        for x in _tensors(o for o in operands if o.written):
            if storage_id(x) in self._inputs:
                self.refuse(
                    f"changes its input in place by {func}: {self._inputs[storage_id(x)][2]}",
                    "return new tensors",
                )
        marked = [
            x for x in _tensors(o for o in operands if o.read) if self._positions.of(x) is not None
        ]
        if marked:
            self._check_operator(func, name, marked)
        out = func(*args, **kwargs)
        if name in _JOINS and marked:
            self._positions.put(out, func([self._filled(x) for x in args[0]], *args[1:], **kwargs))
        elif (
            not _is_view(func, name)
            and not _is_factory(name)
            and (marked or any(o.written for o in operands))
        ):
            self._follow(func, name, operands, out)
        return out

    def see_function(self, func: Any, x: Tensor) -> None:
        """Refuse to hand values to Python or numpy, and to swap an input's data."""
        if self._paused:
            return
        if func in _HOST_READS and self._positions.of(x) is not None:
            self._refuse_reading(f"Tensor.{func.__name__}", x)
        if func == _SET_DATA and storage_id(x) in self._inputs:
            self.refuse(
                f"changes its input in place by setting .data: {self._inputs[storage_id(x)][2]}",
                "return new tensors",
            )

    def _check_operator(self, func: Any, name: str, marked: Sequence[Tensor]) -> None:
        tags = func.tags
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            self._refuse_reading(str(func), marked[0])
        foreach = name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS
        fine = (
            torch.Tag.pointwise in tags
            or foreach
            or name in _COPIES | _JOINS
            or _is_factory(name)
            or _is_view(func, name)
        )
        if not fine:
            self.refuse(
                f"runs {func} on {self._where(marked[0])}: that operator is not elementwise",
                "ask `across` for what concerns more than one element (optim.with_statistics), or "
                "take whole leaves (optim.with_whole_leaves)",
            )

    def _follow(self, func: Any, name: str, operands: Sequence[_Operand], out: Any) -> None:
        """Note what the results were computed from: of a foreach operator, the i-th from the i-th
        of each list."""
        read = [o for o in operands if o.read]
        results = [o.tensors for o in operands if o.written] or [
            [out] if isinstance(out, Tensor) else list(out)
        ]
        for tensors in results:
            for i, x in enumerate(tensors):
                foreach = name.startswith("_foreach_")
                inputs = (
                    [o.tensors[i] if o.listed else o.tensors[0] for o in read]
                    if foreach
                    else list(_tensors(read))
                )
                self._positions.put(x, self._merged(func, inputs, x))

    def _merged(self, func: Any, inputs: Sequence[Tensor], out: Tensor) -> Tensor:
        """The one position each element of `out` was computed from."""
        merged = torch.full(out.shape, -1)
        for x in inputs:
            found = self._positions.of(x)
            if found is None:
                continue
            try:
                found = found.expand(out.shape)
            except RuntimeError:
                found = torch.full(out.shape, -2)
            if bool(((merged >= 0) & (found >= 0) & (merged != found)).any()) or bool(
                (found == -2).any()
            ):
                self.refuse(
                    f"combines elements of different positions by {func}: "
                    f"{' with '.join(map(self._where, inputs))}",
                    "let each result depend on the values at its own position only",
                )
            merged = torch.maximum(merged, found)
        return merged

    def _filled(self, x: Tensor) -> Tensor:
        found = self._positions.of(x)
        return torch.full(x.shape, -1) if found is None else found

    def _own(self, x: Tensor, leaf: int) -> Tensor:
        return leaf * self._width + torch.arange(x.numel()).view(x.shape)

    def _path(self, leaf: int) -> str:
        return self._leaves[leaf] or "(root)"

    def _where(self, x: Tensor) -> str:
        """Which elements of which leaves a tensor was computed from."""
        found = self._positions.of(x)
        numbers = [] if found is None else sorted({n for n in found.reshape(-1).tolist() if n >= 0})
        leaves: dict[str, list[int]] = {}
        for n in numbers:
            leaves.setdefault(self._path(n // self._width), []).append(n % self._width)
        return ", ".join(f"{path}{elements}" for path, elements in leaves.items()) or "no leaf"

    def _refuse_reading(self, operator: str, x: Tensor) -> NoReturn:
        self.refuse(
            f"reads values of {self._where(x)} on the host by {operator}, and other ranks hold "
            "other values",
            "use torch.where, or ask `across`",
        )

    def refuse(self, story: str, remedy: str) -> NoReturn:
        """Raise a `TransformError` that names the transform and the author's line."""
        raise TransformError(
            f"{self._name} {story}{_line() if self._runs else ''}. Remedy: {remedy}"
        )


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch):
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.see(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Sees the few ways to the values that run no operator."""

    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):
            self._watch.see_function(func, args[0])
        return func(*args, **(kwargs or {}))


class _Operand(NamedTuple):
    """One argument of an operator that holds tensors."""

    tensors: list[Tensor]
    listed: bool
    read: bool
    written: bool


def _operands(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Operand]:
    schema = arguments_of(func)
    given = [
        *zip(schema, args, strict=False),
        *((a, kwargs[a.name]) for a in schema if a.name in kwargs),
    ]
    found = []
    for argument, value in given:
        listed = isinstance(value, list | tuple)
        tensors = [x for x in (value if listed else [value]) if isinstance(x, Tensor)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = written and (argument.is_out or name in _OVERWRITES)
        if tensors:
            found.append(_Operand(tensors, listed, not overwritten, written))
    return found


def _tensors(operands: Iterable[_Operand]) -> Iterator[Tensor]:
    for operand in operands:
        yield from operand.tensors


def _is_factory(name: str) -> bool:
    return name.endswith("_like") or name.startswith("new_")


def _is_view(func: Any, name: str) -> bool:
    return func.is_view or name in _VIEWS


def _line() -> str:
    """The innermost line outside torch, optree and this file: where the author wrote it."""
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            file != __file__
            and not file.startswith((*_LIBRARIES, "<"))
            and "contextlib" not in file
        ):
            return f" ({os.path.basename(file)}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
