"""`RanksScope`: what a program's step on ranks shares with the functions of the library that the
program calls. Trees that the program cuts itself have engines of their own, so that no engine
knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from ...optim.base import Transform
from ...step.program import LossCall
from ...step.scope import StepScope, scope_here
from ..failures import sharing_failures
from .donation import Donation
from .kept import KeptTensors
from .ledger import Ledger, LibraryCall, name_results

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


def compared(call: str = "", *, settles: bool = False) -> Callable[[Function], Function]:
    """Let ranks compare the calls of a function of the library, an engine's method say, made by a
    program. See Note [words that wait] in `ledger`. It runs without gradients.

    Outside of a program's step on ranks, and in its threads, nothing is noted, and trees are named
    by what they were made of.

    Args:
        call: in words, of an engine's method, whose failure other ranks are told; "": it tells them
            itself.
        settles: outside of steps, whose ranks agree at the end, whether it waits until its results
            are right; see `sharing_failures`.
    """

    def decorated(function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            scope, groups = ranks_here(), args[0].options.axes.groups if call else ()
            waits = settles and scope_here() is None
            with sharing_failures(*groups, call=call, settles=waits), torch.no_grad():
                if scope is not None and not scope.ledger.takes_calls:
                    return function(*args, **kwargs)
                given, settings = (*args, *kwargs.values()), {}
                for argument in given:
                    if isinstance(argument, Transform):
                        settings["the optimizer"] = args[0].description_of(argument)
                    if isinstance(argument, LossCall):
                        settings["the options"] = {**vars(argument.options)}
                noted = LibraryCall(function.__name__, given, settings)
                # Before the call, which may use up what it is given
                own = nullcontext(noted.origin) if scope is None else scope.ledger.calling(noted)
                with own as origin:
                    made = function(*args, **kwargs)
                name_results(made, origin)
                return made

        return run

    return decorated
