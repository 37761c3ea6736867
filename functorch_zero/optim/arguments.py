"""The arguments of optimizers' factories, and errors that say what belongs in their places."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import torch

from ..errors import explain

# Kinds of arguments that are numbers, by their annotation
_NUMBERS = {"Number", "NumberOrSchedule", "float", "int"}
# Kinds beside which a number's place takes a function of the step, too
_FUNCTIONS = {"NumberOrSchedule", "Schedule", "Callable"}
_BESIDE_A_NUMBER = _NUMBERS | _FUNCTIONS | {"Tensor", "None"}


class _Range(NamedTuple):
    """The values that an argument may have, in words and as a check that a NaN doesn't pass."""

    words: str
    has: Callable[[float], bool]


_DECAY = _Range("0 <= x < 1", lambda x: 0 <= x < 1)
_LIMIT = _Range("> 0", lambda x: x > 0)
_POSITIVE = _Range(">= 0", lambda x: x >= 0)
# By an argument's name, as torch.optim has them; others may have any value
_RANGES = {
    **dict.fromkeys(["b1", "b2", "b3", "beta3"], _DECAY),
    **dict.fromkeys(["max_norm", "max_delta", "clipping"], _LIMIT),
    **dict.fromkeys(["learning_rate", "eps", "eps_root", "momentum", "weight_decay"], _POSITIVE),
}
# A class of torch.optim, in small letters -> our factory of that name. Texts, since the factories
# import this file
_LIKE_TORCHS = {
    "adadelta": "optim.adadelta",
    "adafactor": "optim.adafactor",
    "adagrad": "optim.adagrad",
    "adam": "optim.adam",
    "adamax": "optim.adamax",
    "adamw": "optim.adamw",
    "lbfgs": "optim.lbfgs",
    "muon": "optim.muon",
    "nadam": "optim.nadam",
    "radam": "optim.radam",
    "rmsprop": "optim.rmsprop",
    "rprop": "optim.contrib.rprop",
    "sgd": "optim.sgd",
}
# Names of torch.optim -> ours
_TORCH_NAMES = {"lr": "learning_rate", "betas": "b1 and b2", "rho": "decay", "alpha": "decay"}


def wrong_call(
    name: str, signature: inspect.Signature, keywords: Mapping[str, Any], error: TypeError
) -> TypeError:
    """The error for a call that doesn't fit a factory's signature."""
    remedies = []
    # from_torch takes torch's own names
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in keywords:
        if key in _TORCH_NAMES and key not in signature.parameters and not takes_any:
            remedies.append(f"torch's {key} is {_TORCH_NAMES[key]}")
    if not str(error).startswith("missing"):
        remedies.append("params are given to `init`, and not here")
    taken = ", ".join(signature.parameters)
    remedy = "; ".join(remedies) or None
    return TypeError(explain(f"{name}(): {error}", expected=taken, remedy=remedy))


def check_arguments(
    name: str, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> None:
    """Raise, naming the argument, unless numbers are numbers and transforms are transforms.

    Those are the arguments that the factory annotates with Number, float or int, and with Transform
    alone; Schedule or Callable beside one lets functions pass. Others aren't checked.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a number has dims, or is out of its range.
    """
    for key, value in arguments.items():
        if key not in parameters:  # one of *args or **kwargs
            continue
        kinds = _kinds(parameters[key].annotation)
        if value is None and "None" in kinds:
            continue
        if kinds == {"Transform"}:
            check_is_transform(f"{name}'s {key}", value)
        if not kinds & _NUMBERS or not kinds <= _BESIDE_A_NUMBER:
            continue
        may_be_schedule = bool(kinds & _FUNCTIONS)
        if may_be_schedule and callable(value) and not isinstance(value, type):
            continue
        check_number(f"{name}'s {key}", value, or_schedule=may_be_schedule)
        # Without a flipped sign the caller's own sign counts
        if key in _RANGES and arguments.get("flip_sign") is not False:
            _check_range(f"{name}'s {key}", key, value, parameters[key].default)


def check_number(what: str, value: Any, *, or_schedule: bool = False) -> None:
    """Raise unless a value is one number: a Python one, or a 0-d tensor.

    Raises:
        TypeError: it is something else, such as text that reads as a number, or a bool.
        ValueError: it has dims.
    """
    expected = "a number or a schedule" if or_schedule else "a number"
    if not hasattr(value, "__float__") or isinstance(value, bool | type):
        got = value.__name__ if isinstance(value, type) else f"{value!r:.80}"
        raise TypeError(
            explain(
                f"{what} is no number",
                expected=expected,
                got=f"{type(value).__name__} {got}",
                remedy=_remedy_for_no_number(value),
            )
        )
    shape = tuple(getattr(value, "shape", ()))
    if shape:
        raise ValueError(
            explain(
                f"{what} has dims",
                expected=f"{expected}, or a 0-d tensor",
                got=f"shape {shape}",
                remedy="one number for all leaves; optim.scale_by_label and optim.partition give "
                "leaves numbers of their own",
            )
        )


def _remedy_for_no_number(value: Any) -> str:
    if isinstance(value, type | torch.optim.lr_scheduler.LRScheduler):
        return "a function of the step, such as optim.cosine_decay_schedule(1e-3, decay_steps=100)"
    return "convert text with float(); params are given to `init`"


def _check_range(what: str, key: str, value: Any, default: Any) -> None:
    """Raise ValueError for a number that an optimizer can't use, as torch.optim does: a rate that
    ascends, a mean that grows, a NaN. A tensor's value is not read: it may be traced."""
    allowed = _RANGES[key]
    # A default of 1 makes sums of what else are means
    if not isinstance(value, Real) or allowed.has(float(value)) or value == default:
        return
    remedy = "pass a number in this range"
    if key == "learning_rate" and value < 0:
        remedy = "updates descend already; to ascend, negate the loss"
    raise ValueError(
        explain(
            f"{what} is out of its range",
            expected=allowed.words,
            got=value,
            remedy=remedy,
        )
    )


def _kinds(annotation: Any) -> set[str]:
    """The names in an annotation of one or several kinds, which is text under
    `from __future__ import annotations`, and types otherwise."""
    if isinstance(annotation, str):
        return {kind.partition("[")[0] for kind in annotation.split(" | ")}
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    return {"None" if kind is NoneType else getattr(kind, "__name__", "") for kind in kinds}


def check_is_transform(what: str, value: Any) -> None:
    """Raise TypeError, with the call that makes a transform of this value, unless it is one."""
    if not hasattr(value, "update_fn"):
        got = f"{type(value).__name__} {getattr(value, '__name__', '')}".strip()
        raise TypeError(f"{what} must be an optim.Transform, got {got}. Remedy: {_remedy(value)}")


def _remedy(value: Any) -> str:
    """The way from a value to a transform."""
    if isinstance(value, torch.optim.Optimizer):
        value = type(value)
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
        return _factory_like(value)
    # Optax's pairs, and torchopt's
    if isinstance(value, tuple) and value and all(map(callable, value)):
        return "optim.from_optax(pair, needs=...), or optim.from_torchopt(pair, needs=...)"
    if inspect.isfunction(value):
        return f"call the factory: {value.__name__}(...) returns the transform"
    return (
        "use functorch_zero.optim, or wrap your own with optim.pointwise, with_statistics, "
        "with_whole_leaves or with_whole_tree, which declare how much of a tensor it must see"
    )


def _factory_like(torchs: type[torch.optim.Optimizer]) -> str:
    """The call that makes a transform of a class of torch's, or of a user's."""
    known = getattr(torch.optim, torchs.__name__, None) is torchs
    there = "torch.optim" if known else torchs.__module__
    wrapped = f"optim.from_torch({there}.{torchs.__qualname__}, ...) if it is pointwise"
    ours = _LIKE_TORCHS.get(torchs.__name__.lower()) if known else None
    return f"{ours}(...), or {wrapped}" if ours else wrapped


def check_takes(
    fn: Callable[..., Any], arguments: tuple[str, ...], num_needed: int, *, by: str
) -> int:
    """How many arguments an author's function takes, of those that it can be given by position.

    Args:
        fn: the author's function.
        arguments: the most that it can be given, by position.
        num_needed: the fewest.
        by: the constructor that will call it: "pointwise's update".

    Raises:
        TypeError: fewer than it has to take, or others.
    """
    if not callable(fn):
        raise TypeError(f"{by} must be a function, got {type(fn).__name__}")
    # A decorator may give the function inside, whose arguments it shows, others than it takes
    for follows in (True, False):
        try:
            signature = inspect.signature(fn, follow_wrapped=follows)
        except ValueError:  # a builtin such as torch.zeros_like tells none
            return num_needed
        for num in range(len(arguments), num_needed - 1, -1):
            try:
                signature.bind(*arguments[:num])
            except TypeError:
                continue
            return num
    expected = [f"({', '.join(arguments[:n])})" for n in range(num_needed, len(arguments) + 1)]
    name = getattr(fn, "__qualname__", type(fn).__name__)
    raise TypeError(
        explain(
            f"{by} can't be called with the arguments that it is given",
            expected=" or ".join(expected),
            got=f"{name}{signature}",
            remedy="take them all, also those that it doesn't read",
        )
    )
