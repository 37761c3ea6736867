"""`WatchedCall`: one call of a program on this rank, and what it must not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from ...params import is_on_engine
from ...step.loss import Metrics
from ...step.program_step import Unwritten
from ...tree import paths
from .library_calls import LibraryCalls
from .piece_watch import PieceWatch
from .results import StepResults
from .value import tensors_of_nodes, used_up_nodes


class WatchedCall:
    """Watches one call of a program: the library's functions that it calls, and its writes to the
    value. Where the call is looked at, its operators on pieces, too.

    Args:
        value: given to the program.
        step: its number.
        rank: this one.
        look: whether the call is looked at, on all ranks alike.
        before_call: lets ranks compare the library's functions that the program has called so far,
            in a step of this number; asked where the call is looked at.

    Attributes:
        library: the library's functions that the program has called.
    """

    def __init__(
        self,
        value: Any,
        step: int,
        rank: int,
        *,
        look: bool,
        before_call: Callable[[int, Sequence[str]], None],
    ):
        self._value, self._step, self._rank, self._look = value, step, rank, look
        self.library = LibraryCalls(partial(before_call, step) if look else None)
        self._operators = PieceWatch(rank)
        if look:
            self._operators.name(value, "value")
        self._unwritten = Unwritten(tensors_of_nodes(value), look=look)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the program that runs inside."""
        operators = self._operators.running() if self._look else nullcontext()
        with operators, self.library.running():
            yield

    def check_unwritten(self) -> None:
        """Raise StructureError, naming the path, if the program has written to its value."""

        def path_of(node: int, leaf: int) -> str:
            return paths(self._value, is_on_engine)[node]

        self._unwritten.check(path_of, self._rank, used_up_nodes(self._value))

    def results(
        self, args: Sequence[Any], value: Any, metrics: Metrics, num_draws: int
    ) -> StepResults:
        """The results of the step, for ranks to compare.

        Args:
            args: of the step, after the state.
            value: the next one.
            metrics: by name, 0-d.
            num_draws: of `fz.random`.
        """
        return StepResults(
            step=self._step,
            args=args,
            calls=self.library.made,
            value=value,
            metrics=metrics,
            num_draws=num_draws,
            watch=self._operators,
            look=self._look,
        )
