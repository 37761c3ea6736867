"""The arguments of optimizers' factories, and errors that say what belongs in their places."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch

from ..errors import explain

# Names of torch.optim -> ours
_TORCH_NAMES = {"lr": "learning_rate", "betas": "b1 and b2", "rho": "decay", "alpha": "decay"}


def wrong_call(
    name: str, signature: inspect.Signature, keywords: Mapping[str, Any], error: TypeError
) -> TypeError:
    """The error for a call that doesn't fit a factory's signature."""
    remedies = []
    for key in keywords:
        if key in _TORCH_NAMES and key not in signature.parameters:
            remedies.append(f"torch's {key} is {_TORCH_NAMES[key]}")
    remedies.append("params are given to `init`, and not here")
    taken = ", ".join(signature.parameters)
    return TypeError(explain(f"{name}(): {error}", expected=taken, remedy="; ".join(remedies)))


def check_arguments(
    name: str, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> None:
    """Raise, naming the argument, unless numbers are numbers and transforms are transforms.

    Those are the arguments that the factory annotates with Number or float, and with Transform
    alone; Schedule or Callable beside Number lets functions pass. Others aren't checked.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a learning rate is negative.
    """
    for key, value in arguments.items():
        if key not in parameters:  # one of *args or **kwargs
            continue
        kinds = _kinds(parameters[key].annotation)
        if value is None and "None" in kinds:
            continue
        if kinds == {"Transform"}:
            check_is_transform(f"{name}'s {key}", value)
        # Text that reads as a number is none
        if kinds & {"Number", "float"} and not hasattr(value, "__float__"):
            may_be_schedule = bool(kinds & {"Schedule", "Callable"})
            if may_be_schedule and callable(value):
                continue
            raise TypeError(
                explain(
                    f"{name}'s {key} is no number",
                    expected="a number or a schedule" if may_be_schedule else "a number",
                    got=f"{type(value).__name__} {value!r:.80}",
                    remedy="convert text with float(); params are given to `init`",
                )
            )
    _check_sign(name, arguments)


def _kinds(annotation: Any) -> set[str]:
    """The names in an annotation of one or several kinds, which is text under
    `from __future__ import annotations`, and types otherwise."""
    if isinstance(annotation, str):
        return {kind.partition("[")[0] for kind in annotation.split(" | ")}
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    names = {getattr(kind, "__name__", "") for kind in kinds}
    return names | ({"None"} if NoneType in kinds else set())


def _check_sign(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a rate that would ascend, or is a NaN."""
    rate = arguments.get("learning_rate")
    # Without a flipped sign the caller's own sign counts
    if not isinstance(rate, Real) or arguments.get("flip_sign") is False or float(rate) >= 0:
        return
    remedy = "updates descend already; to ascend, negate the loss"
    raise ValueError(
        explain(f"{name}'s learning_rate is negative", expected=">= 0", got=rate, remedy=remedy)
    )


def check_is_transform(what: str, value: Any) -> None:
    """Raise TypeError, with the call that makes a transform of this value, unless it is one."""
    if not hasattr(value, "update_fn"):
        got = f"{type(value).__name__} {_called(value)}".strip()
        raise TypeError(f"{what} must be an optim.Transform, got {got}. Remedy: {_remedy(value)}")


def _called(value: Any) -> str:
    return getattr(value, "__name__", "")


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
    from .. import optim  # not above: it imports this file

    known = getattr(torch.optim, torchs.__name__, None) is torchs
    there = "torch.optim" if known else torchs.__module__
    wrapped = f"optim.from_torch({there}.{torchs.__qualname__}, ...) if it is pointwise"
    name = torchs.__name__.lower()
    for folder, module in {"optim": optim, "optim.contrib": optim.contrib}.items():
        if known and name in module.__all__:
            return f"{folder}.{name}(...), or {wrapped}"
    return wrapped


def check_takes(
    fn: Callable[..., Any], arguments: tuple[str, ...], num_needed: int, *, by: str
) -> None:
    """Raise TypeError unless an author's function takes the arguments that it will be given.

    Args:
        fn: the author's function.
        arguments: the most that it can be given, by position.
        num_needed: the fewest.
        by: the constructor that will call it: "pointwise's update".
    """
    if not callable(fn):
        raise TypeError(f"{by} must be a function, got {type(fn).__name__}")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a builtin such as torch.zeros_like tells none
        return
    for num in range(num_needed, len(arguments) + 1):
        try:
            signature.bind(*arguments[:num])
        except TypeError:
            continue
        return
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
