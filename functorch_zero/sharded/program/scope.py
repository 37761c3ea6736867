"""`RanksScope`: what a program's step on ranks shares with the functions of the library that the
program calls. Trees that the program cuts itself have engines of their own, so that no engine
knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

from ...optim.base import Transform
from ...step.program import LossCall
from ...step.scope import StepScope, scope_here
from .donation import Donation
from .kept import KeptTensors
from .ledger import Ledger, LibraryCall, name_results

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(kw_only=True)
class RanksScope(StepScope):
    """One call of a program's step, on this rank.

    Attributes:
        ledger: the words that this rank owes the others.
        donation: of the value; None: the step doesn't donate.
        kept: the tensors that the reduction of gradients keeps; None: it keeps nothing.
    """

    ledger: Ledger
    donation: Donation | None = None
    kept: KeptTensors | None = None


def ranks_here() -> RanksScope | None:
    """That of the step on ranks whose program runs in this thread; None: none does."""
    scope = scope_here()
    return scope if isinstance(scope, RanksScope) else None


def compared(method: Function) -> Function:
    """Let ranks compare the calls of an engine's method, made by a program. See Note [words that
    wait] in `ledger`."""

    @wraps(method)
    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        scope = ranks_here()
        if scope is not None and not scope.ledger.takes_calls:
            return method(engine, *args, **kwargs)
        given, settings = (*args, *kwargs.values()), {}
        for argument in given:
            if isinstance(argument, Transform):
                settings["the optimizer"] = engine.description_of(argument)
            if isinstance(argument, LossCall):
                settings["the options"] = {**vars(argument.options)}
        function = partial(method, engine, *args, **kwargs)
        return of_call(method.__name__, given, settings, function)

    return run  # type: ignore[return-value]


def of_call(
    name: str, given: Sequence[Any], settings: Mapping[str, Any], function: Callable[[], T]
) -> T:
    """The result of a call of the library, as of `Ledger.of_call`; outside of a program's step on
    ranks, and in its threads, nothing is noted, and trees are named by what they were made of."""
    scope = ranks_here()
    if scope is not None and not scope.ledger.takes_calls:
        return function()
    call = LibraryCall(name, given, settings)
    if scope is not None:
        return scope.ledger.of_call(call, function)
    # Before the call, which may use up what it is given
    origin, made = call.origin, function()
    name_results(made, origin)
    return made
