"""Exchanges of a loss: collectives that the loss starts itself, and those they owe in backward.

A loss over the whole batch asks other ranks for their rows; a table asks for some of its own. What
comes back depends on the other ranks' params, so backward owes a collective: what this rank's loss
says of others' rows goes to them. `Pass.exchange` runs both at their places in a pass.

Note [roots]: a rank whose own loss makes no use of what it was sent still owes it: the other ranks
wait, and may have gradients for its rows. Autograd would never come to the node. So each exchange
has a second result, a 0-d root, and the pass differentiates all roots together with the loss, with
zeros as their seeds. Then backward comes to every exchange on every rank. Their order is that of
forward reversed: a node that others wait for is newer than what it leads to.

Note [received again]: a checkpoint runs its region once more in backward, at moments that differ by
rank. So a region keeps what its exchanges returned, and a second run is given that: it starts no
collective. Torch makes one object per region, with which it is kept, and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch_private import memory_of_region
from ..errors import StructureError


class Exchange(Protocol):
    """A collective of a loss, and the one that it owes in backward; for one call.

    All ranks of the pass call it, in the same order among the uses of units.

    Attributes:
        word: what it exchanges, in words that must be equal on all ranks. A comma ends its name:
            "fz.batch.all_rows, of rows of (8,)".
    """

    word: str

    def there(self, x: Tensor) -> Tensor:
        """The collectives of forward. Returns a new tensor, without a graph."""
        ...

    def back(self, grad: Tensor) -> Tensor | None:
        """Those of backward: the gradient of what `there` returned -> that of `x`, or None where
        `x` is the pass's anchor. Zeros where this rank's loss made no use of it."""
        ...


class Exchanged(torch.autograd.Function):
    """Forward: an exchange's result, and its root. Backward: to the pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, around: Any) -> tuple[Tensor, Tensor]:
        result = exchange.there(x).data  # no view, which the loss couldn't write to
        ctx.exchange, ctx.around = exchange, around
        return result, result.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, None, None]:
        return ctx.around.on_exchange(ctx.exchange, grad), None, None


class ReceivedAgain(torch.autograd.Function):
    """A result in a region that runs again. As the first time, what follows saves tensors; backward
    goes through the first run's nodes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Sequence[Tensor]) -> Tensor:
        return result[0]  # in a sequence: as an argument of its own, the loss couldn't write to it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise StructureError("a gradient was taken of a region that a checkpoint runs again")


class Region:
    """The exchanges in one region of `torch.utils.checkpoint`; see Note [received again]."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Tensor]] = []  # words and results, in their order
        self.run: Any = None  # the one that runs now, an object of its own
        self._run: Any = None  # that goes through the results,
        self._rest = iter(self._kept)  # and those that it has yet to come to

    def keep(self, word: str, result: Tensor) -> None:
        """Note the result of an exchange in the first run."""
        # A copy: the loss may write to its own
        self._kept.append((word, result.detach().clone()))

    def again(self, word: str) -> Tensor | None:
        """The result for another run of the region; None: the first one had no such exchange."""
        if self.run is not self._run:
            self._run, self._rest = self.run, iter(self._kept)
        said, result = next(self._rest, ("", None))
        return result.clone() if said == word and result is not None else None


def region_of(hooks: Any) -> Region | None:
    """The region of a checkpoint whose saved-tensor hooks these are; None: of none."""
    kept = None if hooks is None else memory_of_region(hooks)
    if kept is None:
        return None
    region: Region = kept.setdefault("exchanges", Region())
    region.run = hooks[0]
    return region


_NO_TABLE = 'or, of rows of a table, keep it as other leaves, level={"": 3, "embed.weight": 3}, say'


def ran_again(word: str) -> StructureError:
    """The error for an exchange in backward of which nobody knows the first run."""
    return _refused(
        word,
        "an exchange of a loss ran again in backward, at moments that differ by rank",
        expected="exchanges in the forward of the loss, each in one checkpoint at most",
        remedy="take the exchange out of the inner of two checkpoints, and out of the backward of "
        f"a custom autograd.Function; {_NO_TABLE}",
    )


def differentiated_inside(word: str) -> StructureError:
    """The error for a backward of a loss's own that has come to an exchange."""
    return _refused(
        word,
        "a gradient was taken inside of a loss, through rows of other ranks. Each rank's inner "
        "loss counts in it, which is the whole batch's on some and one rank's on others",
        expected="a gradient of the loss alone, by the step or by fz.value_and_grad",
        remedy="take the inner gradient of what comes before the exchange, by each rank's own "
        f"rows; fz.hvp can't go through an exchange either; {_NO_TABLE}",
    )


def transformed(word: str) -> StructureError:
    """The error for an exchange inside of a transform of torch.func."""
    return _refused(
        word,
        "an exchange of a loss was called inside of a transform of torch.func, such as grad or "
        "vmap",
        remedy="call it on the results of the transform, or on what goes into it",
    )


def _refused(word: str, why: str, *, remedy: str, expected: str | None = None) -> StructureError:
    return StructureError(why, path=name_in(word), expected=expected, remedy=remedy)


def name_in(word: str) -> str:
    """The name at the begin of an exchange's word."""
    return word.partition(",")[0]
