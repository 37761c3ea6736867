"""Names and hyperparameters of transforms and schedules: they print, compare across ranks, and go
into checkpoints.

`named` on a factory is all that an author writes. Where a factory has none, its functions stand for
it, and `described` reads the numbers that they refer to.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from numbers import Real
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ..tree import content_digests

P = ParamSpec("P")  # of a factory's arguments
Made = TypeVar("Made")  # a transform or a schedule

SMALL = 16  # elements of a tensor that is described by its values; a larger one has a digest
DEPTH = 12  # of functions that refer to functions: a cycle ends there


@dataclass(frozen=True, repr=False)
class Named:
    """A thing that knows how it was made."""

    name: str = field(default="", kw_only=True)  # the factory's; qualified, where it isn't ours
    # The arguments of the call, defaults included; "0", "1", … are those of *args
    # Not compared, and so not hashed: it may hold dicts and tensors
    hyperparams: Mapping[str, Any] = field(default_factory=dict, kw_only=True, compare=False)

    def __repr__(self) -> str:
        # Those before the last of *args are positional, too
        num_positional = 0
        for i, key in enumerate(self.hyperparams, 1):
            if key.isdigit():
                num_positional = i
        arguments = []
        for i, (key, value) in enumerate(self.hyperparams.items()):
            printed = _printed(value)
            arguments.append(printed if i < num_positional else f"{key}={printed}")
        name = self.name.rpartition(".")[2] or type(self).__name__.lower()
        return f"{name}({', '.join(arguments)})"


@dataclass(frozen=True, repr=False)
class NamedFunction(Named):
    """A function, a schedule say, that knows how it was made."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    # `inspect` would find (*args) of __call__; the number of arguments tells schedules from others
    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)


def named(factory: Callable[P, Made]) -> Callable[P, Made]:
    """Give a factory's transforms or schedules its name and the arguments of their call.

    They print. At `init` they are compared across ranks, so that a learning rate that differs is
    named in the error. They are written into checkpoints.

    >>> from functorch_zero import optim
    >>> @optim.named
    ... def signs(learning_rate, decay=0.0):
    ...     return optim.chain(optim.scale_by_sign(), optim.scale_by_learning_rate(learning_rate))
    >>> signs(optim.linear_schedule(0.1, 0.0, 10))
    signs(learning_rate=linear_schedule(init_value=0.1, end_value=0.0, transition_steps=10, \
transition_begin=0), decay=0.0)

    Without it a transform is known by its author's functions, and ranks compare the numbers that
    these refer to: closed over, as defaults, written in the code, or global.

    Raises:
        TypeError: the factory returns neither a transform nor a function.
    """
    # Read once, when the factory is defined
    signature = inspect.signature(factory)
    name = _qualified(factory)

    @wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Made:
        made = factory(*args, **kwargs)
        if torch.compiler.is_compiling():  # a kernel has no use for names
            return made
        # The factory's own arguments replace those of the constructor that it called
        arguments = arguments_of(signature, *args, **kwargs)
        if isinstance(made, Named):
            return replace(made, name=name, hyperparams=arguments)
        if callable(made):
            return cast("Made", NamedFunction(made, name=name, hyperparams=arguments))
        raise TypeError(
            f"named: {name} returned a {type(made).__name__}, expected a transform or a schedule. "
            "Remedy: return what optim.pointwise or its like makes, or a function of the step"
        )

    return make


def arguments_of(signature: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name, defaults included."""
    # They fit: callers have passed or bound them before
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for key, value in bound.arguments.items():
        kind = signature.parameters[key].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {str(i): one for i, one in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[key] = value
    return arguments


def described(thing: Any, depth: int = DEPTH) -> Any:
    """A transform, a schedule or a hyperparameter as plain JSON data. Equal for equal ones.

    Of a function without a name, the numbers that it refers to.
    """
    # Made by a named factory: the call says all
    if isinstance(thing, Named) and thing.name:
        return {thing.name: described(thing.hyperparams)}
    # Numbers and texts, of which JSON has most
    if isinstance(thing, float) and not math.isfinite(thing):
        return str(thing)  # JSON has no infinity
    if isinstance(thing, bool | int | float | str | None):
        return thing
    if isinstance(thing, complex):
        return str(thing)
    # Things of torch; tensors by dtype, shape and values
    if isinstance(thing, torch.dtype | enum.Enum):
        return str(thing)
    if isinstance(thing, torch.device):
        return thing.type  # ranks have devices of their own
    if isinstance(thing, Tensor):
        values = thing.tolist() if _is_small(thing) else content_digests({"": thing})
        return [str(thing.dtype), list(thing.shape), described(values)]
    if isinstance(thing, type):
        return _qualified(thing)
    # Containers and functions lead to other things, one level down each
    if depth == 0:
        return type(thing).__name__
    if isinstance(thing, Mapping):  # JSON's keys are texts
        return {str(key): described(value, depth - 1) for key, value in thing.items()}
    if isinstance(thing, tuple | list):
        return [described(value, depth - 1) for value in thing]
    if isinstance(thing, set | frozenset):  # in one order on every rank
        return sorted((described(value, depth - 1) for value in thing), key=repr)
    if inspect.ismethod(thing):
        return [described(thing.__func__, depth - 1), described(thing.__self__, depth - 1)]
    if isinstance(thing, partial):
        return [described(x, depth - 1) for x in (thing.func, thing.args, thing.keywords)]
    if inspect.isfunction(thing):
        return {_qualified(thing): described(_referred_to(inspect.unwrap(thing)), depth - 1)}
    # Numbers and arrays of other libraries, as those of ours
    if isinstance(thing, Real):  # numpy's, say
        return float(thing)
    if hasattr(thing, "__array_interface__"):  # numpy's arrays
        return [str(thing.dtype), described(thing.tolist(), depth - 1)]
    # An object of the author's own: its attributes, three levels of them at most
    attributes = dict(getattr(thing, "__dict__", {}))
    return {type(thing).__qualname__: described(attributes, min(depth - 1, 3))}


def _referred_to(function: FunctionType) -> dict[str, Any]:
    """The things that a function's results may depend on beside its arguments, by name."""
    found: dict[str, Any] = {}  # name -> value; "defaults" and "literals" stand for several
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for variable, cell in cells:
        try:
            found[variable] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    # Positional ones as values, keyword-only ones as (name, value)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    # Not the code itself: another operator in its place would show in none of these
    literals: list[Any] = []
    for code in _code_of(function.__code__):
        for constant in code.co_consts:
            # Texts are left out: docstrings and messages are among them
            if isinstance(constant, bool | int | float | tuple):
                literals.append(constant)
        # Names of globals and of attributes alike: those that no global has are passed over
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, int | float | Named):
                found[name] = value
    if defaults:
        found["defaults"] = defaults
    if literals:
        found["literals"] = literals
    return found


def _code_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _code_of(const)


def _qualified(thing: Any) -> str:
    """A factory's name: short where it is ours, so that users' own are never mistaken for it."""
    ours = thing.__module__.startswith("functorch_zero.") and "<" not in thing.__qualname__
    return thing.__qualname__ if ours else f"{thing.__module__}.{thing.__qualname__}"


def _printed(value: Any) -> str:
    if isinstance(value, Tensor) and _is_small(value):
        return str(value.tolist())
    if isinstance(value, Mapping):
        items = ", ".join(f"{key!r}: {_printed(x)}" for key, x in value.items())
        return "{" + items + "}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_printed, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    # Functions and classes by name: their repr has an address, which differs from run to run
    return getattr(value, "__qualname__", None) or repr(value)


def _is_small(tensor: Tensor) -> bool:
    # A meta tensor has no values to print
    return tensor.numel() <= SMALL and not tensor.is_meta
