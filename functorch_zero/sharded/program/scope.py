"""`RanksScope`: what a program's step on ranks shares with the functions of the library that the
program calls. Trees that the program cuts itself have engines of their own, so that no engine
knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar

from ...optim.base import Transform
from ...step.scope import StepScope, scope_here
from .donation import Donation
from .kept import KeptTensors
from .ledger import Ledger, LibraryCall, forget

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


class _Describing(Protocol):
    def description_of(self, transform: Transform) -> Any: ...


def compared(method: Function) -> Function:
    """Let ranks compare the calls of an engine's method, made by a program. See Note [words that
    wait] in `ledger`."""

    @wraps(method)
    def run(engine: _Describing, *args: Any, **kwargs: Any) -> Any:
        given, settings = (*args, *kwargs.values()), {}
        for argument in given:
            if isinstance(argument, Transform):
                settings["the optimizer"] = engine.description_of(argument)
        with calling(method.__name__, given, settings) as note_made:
            made = method(engine, *args, **kwargs)
            note_made(made)
            return made

    return run  # type: ignore[return-value]


def calling(
    name: str, given: Sequence[Any], settings: Mapping[str, Any]
) -> AbstractContextManager[Callable[[Any], None]]:
    """Around a call of the library, as `Ledger.calling`; outside of a program's step on ranks
    nothing is noted."""
    scope = ranks_here()
    if scope is None:
        return nullcontext(forget)
    return scope.ledger.calling(LibraryCall(name, given, settings))
