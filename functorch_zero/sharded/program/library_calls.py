"""The calls of the library that a program makes: ranks make the same ones, in the same order.

Note [calls of a program]: a rank that makes one call more than the others starts collectives that
meet those of another call. Over gloo, where their lengths differ, that ends a process by SIGABRT;
where they are equal, it gives wrong sums. So in calls that all ranks look at, they compare each one
before it starts a collective, by a message of the same length as the one that ends the step. In
other steps they compare the calls at the end alone, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import optree

from ...layout.sharded_tree import ShardedTree
from ...params import is_on_engine
from ...step.program import LossCall

Function = TypeVar("Function", bound=Callable[..., Any])


class LibraryCalls:
    """The library's calls in one call of a program, on this rank.

    Args:
        meet: given the calls up to each one before it begins, for ranks to compare; None: they
            compare them at the end of the step alone.

    Attributes:
        made: so far, in words that are the same on all ranks.
    """

    def __init__(self, meet: Callable[[Sequence[str]], None] | None):
        self.made: list[str] = []
        self._meet = meet

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note the calls inside."""
        token = _CALLS.set(self)
        try:
            yield
        finally:
            _CALLS.reset(token)

    def begin(self, name: str, given: Sequence[Any]) -> None:
        """Note a call that is about to be made."""
        words, trees = [name], []
        for argument in given:
            if isinstance(argument, LossCall):
                loss = argument.counted
                words.append(f"of {getattr(loss, '__qualname__', type(loss).__name__)}")
                trees.append(argument.args)
            else:
                trees.append(argument)
        if labels := _labels_of(trees):
            words.append(f"at {' and '.join(labels)}")
        self.made.append(" ".join(words))
        if self._meet is not None:
            self._meet(self.made)


def _labels_of(trees: Any) -> list[str]:
    """The labels of the sharded trees in a tree, the same on all ranks; a tree's gradients have its
    label."""
    nodes = optree.tree_leaves(trees, is_leaf=is_on_engine)
    return [node.holding.label for node in nodes if isinstance(node, ShardedTree)]


# Those of the program that runs in this thread, outside of the library's calls
_CALLS: ContextVar[LibraryCalls | None] = ContextVar("_CALLS", default=None)


def compared(function: Function) -> Function:
    """Let ranks compare the calls of a function, made by a program. See Note [calls of a
    program]."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return function(*args, **kwargs)
        calls.begin(function.__name__, (*args, *kwargs.values()))
        # The calls that it makes itself follow from it
        token = _CALLS.set(None)
        try:
            return function(*args, **kwargs)
        finally:
            _CALLS.reset(token)

    return run  # type: ignore[return-value]
