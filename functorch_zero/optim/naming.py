"""Names and hyperparameters of transforms and schedules: they print, compare across ranks, and go
into checkpoints.

`named` on a factory is all that an author writes. Where a factory has none, its functions stand for
it, and `described` reads their code and the things that they refer to.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from numbers import Real
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ..introspection import is_filled, slot_values
from ..tree import content_digests
from .arguments import check_arguments, wrong_call

P = ParamSpec("P")  # of a factory's arguments
Made = TypeVar("Made")  # a transform or a schedule

SMALL = 16  # elements of a tensor that is described by its values; a larger one has a digest
DEPTH = 12  # of containers in containers: a cycle ends there. Functions are described once
# Their functions are known by name: ranks compare releases
_LIBRARIES = {"functorch_zero", "numpy", "optree", "torch"}


@dataclass(frozen=True, repr=False, eq=False)
class Named:
    """A thing that knows how it was made. It equals itself alone, since functions do."""

    name: str = field(default="", kw_only=True)  # the factory's; qualified, where it isn't ours
    # The arguments of the call, defaults included; "0", "1", … are those of *args
    # Not compared, and so not hashed: it may hold dicts and tensors
    hyperparams: Mapping[str, Any] = field(default_factory=dict, kw_only=True, compare=False)
    factory: Any = field(default=None, kw_only=True, compare=False)  # where it isn't ours

    def __repr__(self) -> str:
        # Those before the last of *args are positional, too
        last = max((i for i, key in enumerate(self.hyperparams) if key.isdigit()), default=-1)
        arguments = []
        for i, (key, value) in enumerate(self.hyperparams.items()):
            printed = _printed(value)
            arguments.append(printed if i <= last else f"{key}={printed}")
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

    Without it a transform is known by its author's functions, and ranks compare their code and the
    things that they refer to: closed over, as defaults, written in the code, or global.

    Raises:
        TypeError: the factory returns neither a transform nor a function. A call raises it for
            arguments that don't fit the signature, and for those annotated `Number` or `Transform`
            that are none.
    """
    # Read once, when the factory is defined
    signature = inspect.signature(factory)
    name = _qualified(factory)
    users = factory if _is_followed(factory) else None

    @wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Made:
        if torch.compiler.is_compiling():  # a kernel has no use for names
            return factory(*args, **kwargs)
        try:
            arguments = arguments_of(signature.bind(*args, **kwargs))
        except TypeError as error:
            raise wrong_call(name, signature, kwargs, error) from None
        check_arguments(name, signature.parameters, arguments)
        made = factory(*args, **kwargs)
        # The factory's own arguments replace those of the constructor that it called
        if isinstance(made, Named):
            return replace(made, name=name, hyperparams=arguments, factory=users)
        if callable(made):
            function = NamedFunction(made, name=name, hyperparams=arguments, factory=users)
            return cast("Made", function)
        raise TypeError(
            f"named: {name} returned a {type(made).__name__}, expected a transform or a schedule. "
            "Remedy: return what optim.pointwise or its like makes, or a function of the step"
        )

    return make


def arguments_of(bound: inspect.BoundArguments) -> dict[str, Any]:
    """A call's arguments by name, defaults included, which are bound, too."""
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for key, value in bound.arguments.items():
        kind = bound.signature.parameters[key].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {str(i): one for i, one in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[key] = value
    return arguments


def described(thing: Any) -> Any:
    """A transform, a schedule or a hyperparameter as plain JSON data. Equal for equal ones.

    Of a function without a name, its code and the things that it refers to: numbers, tables,
    objects, and functions that are neither Python's own nor a library's.
    """
    return _Description().of(thing)


class _Description:
    """One run of `described`: a function that is reached twice is described once."""

    def __init__(self) -> None:
        self._functions: set[int] = set()

    def of(self, thing: Any, depth: int = DEPTH) -> Any:
        if isinstance(thing, Named) and thing.name:
            made_by = {} if thing.factory is None else {"(factory)": thing.factory}
            return {thing.name: self.of({**thing.hyperparams, **made_by})}
        if isinstance(thing, float) and not math.isfinite(thing):
            return str(thing)  # JSON has no infinity
        if type(thing) in (bool, int, float, str, type(None)):
            return thing
        if isinstance(thing, complex | bytes | torch.dtype | enum.Enum):
            return str(thing)
        if isinstance(thing, torch.device):
            return thing.type  # ranks have devices of their own
        if _is_array(thing):
            is_large = isinstance(thing, Tensor) and not _is_small(thing)
            values = content_digests({"": thing}) if is_large else thing.tolist()
            return [str(thing.dtype), list(thing.shape), self.of(values)]
        if isinstance(thing, type):
            return _qualified(thing)
        if depth == 0 or isinstance(thing, ModuleType):
            return type(thing).__name__
        if isinstance(thing, Mapping):
            # JSON's keys are texts; in brackets the number 1 is not the text "1"
            texts = [key if isinstance(key, str) else f"({key})" for key in thing]
            values = [self.of(value, depth - 1) for value in thing.values()]
            return dict(zip(texts, values, strict=True))
        if inspect.ismethod(thing):
            thing = thing.__func__, thing.__self__
        if isinstance(thing, partial):
            thing = thing.func, thing.args, thing.keywords
        if isinstance(thing, tuple | list):
            return [self.of(value, depth - 1) for value in thing]
        if isinstance(thing, set | frozenset):  # in one order on every rank
            return sorted((self.of(value, depth - 1) for value in thing), key=repr)
        if isinstance(thing, Real):
            return float(thing)
        if inspect.isfunction(thing):
            return self._of_function(thing)
        return {type(thing).__qualname__: self.of(_attributes(thing), min(depth - 1, 3))}

    def _of_function(self, function: FunctionType) -> Any:
        if id(function) in self._functions:
            return _qualified(function)
        self._functions.add(id(function))
        referred = _referred_to(cast("FunctionType", inspect.unwrap(function)))
        return {_qualified(function): self.of(referred)}


def _attributes(thing: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots too; and its class's way to be called."""
    found = slot_values(thing)
    found |= getattr(thing, "__dict__", {})
    call = inspect.getattr_static(type(thing), "__call__", None)
    if inspect.isfunction(call) and _is_followed(call):
        found["(call)"] = call
    return found


def _referred_to(function: FunctionType) -> dict[str, Any]:
    """The things that a function's results may depend on beside its arguments, by name."""
    found: dict[str, Any] = {}  # by name; in brackets, which no variable has, where it is ours
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for variable, cell in cells:
        if is_filled(cell):
            found[variable] = cell.cell_contents
    # Positional ones as values, keyword-only ones as (name, value)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    # Numbers on their own, so that an error can name the one that differs
    literals: list[Any] = []
    for code in _code_of(function.__code__):
        for constant in code.co_consts:
            # Texts are left out: docstrings and messages are among them
            if isinstance(constant, bool | int | float | tuple):
                literals.append(constant)
        found |= _globals_of(code, function.__globals__)
    if defaults:
        found["(defaults)"] = defaults
    if literals:
        found["(literals)"] = literals
    # Last, since the numbers say more: it differs by everything else, such as another operator.
    # A library's function, one without a name that a user was given, is known by its release.
    if _is_followed(function):
        found["(code)"] = _digest(function.__code__)
    return found


def _globals_of(code: CodeType, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The global things that code names, by dotted name: `rates`, `config.rates`. Of a module or an
    object, the attributes that it names: others may differ between ranks."""
    found: dict[str, Any] = {}
    for name, *attributes in _dotted_names(code):
        thing = namespace.get(name)
        for attribute in attributes:
            inner = getattr(thing, attribute, None)
            # A method of data is about all of it
            if _is_data(thing) and callable(inner):
                break
            name, thing = f"{name}.{attribute}", inner
        if thing is not None and _is_followed(thing):
            found[name] = thing
    return found


def _dotted_names(code: CodeType) -> list[list[str]]:
    """The global names in code, each with the attributes that are read of it at once."""
    names: list[list[str]] = []
    is_read = False  # whether the instruction before read the last of these
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.append([step.argval])
            is_read = True
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and is_read:
            names[-1].append(step.argval)
        else:
            is_read = False
    return names


def _is_array(thing: Any) -> bool:
    """Whether it is a tensor, or numpy's: an array or a number."""
    return isinstance(thing, Tensor) or hasattr(thing, "__array_interface__")


def _is_data(thing: Any) -> bool:
    """Whether it is a table of values, of Python or of a library: described whole."""
    return _is_array(thing) or isinstance(thing, Mapping | list | tuple | set | frozenset)


def _is_followed(thing: Any) -> bool:
    """Whether a thing that a function names is data, or a user's: no module or class, nothing of
    Python or a library."""
    if _is_array(thing) or isinstance(thing, Named | Mapping | partial):
        return True
    if isinstance(thing, ModuleType | type) or inspect.isbuiltin(thing):
        return False
    owner = thing if inspect.isroutine(thing) else type(thing)
    module = getattr(owner, "__module__", None) or "builtins"
    library = module.partition(".")[0]
    if library == "builtins":  # numbers, lists, sets, and the like
        return True
    return library not in _LIBRARIES and library not in sys.stdlib_module_names


def _digest(code: CodeType) -> str:
    """Of the code of a function and of those inside it. 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in _code_of(code):
        digest.update(part.co_code)
        digest.update(repr(part.co_names).encode())
        for constant in part.co_consts:
            if isinstance(constant, frozenset):  # in one order on every rank
                constant = sorted(map(repr, constant))
            if not isinstance(constant, CodeType):
                digest.update(repr(constant).encode())
    return digest.hexdigest()[:16]


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
    """A hyperparameter as the `repr` of a transform shows it."""
    if isinstance(value, Tensor) and _is_small(value):
        return str(value.tolist())
    if isinstance(value, Mapping):
        items = ", ".join(f"{key!r}: {_printed(x)}" for key, x in value.items())
        return "{" + items + "}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_printed, value))
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    # Functions and classes by name: their repr has an address, which differs from run to run
    return getattr(value, "__qualname__", None) or repr(value)


def _is_small(tensor: Tensor) -> bool:
    # A meta tensor has no values to print
    return tensor.numel() <= SMALL and not tensor.is_meta
