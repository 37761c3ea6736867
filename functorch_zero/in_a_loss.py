"""Whether a loss runs: some functions would be wrong inside of one whose gradient is taken, and
sharded trees that it was not given would be pieces. Nothing would tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from .errors import StructureError

# The end of a remedy: such a gradient isn't that of the whole batch
OF_THIS_RANK = (
    "On ranks, a gradient by params inside of a loss is that of one rank's rows. "
    'docs/howto/inside-a-loss.md, "Of this rank\'s rows", says where that is right; fz.hvp is '
    'exact, see docs/extend/programs.md, "Second derivatives"'
)


class _Running(NamedTuple):
    """The loss, or other part of a step, that runs in this thread."""

    is_loss: bool = False  # whose gradient is taken
    rank: int | None = None  # on which that loss is sharded; None: it isn't
    hides_trees: bool = False  # a sharded loss or evaluation is given lazy parameters instead


# A context variable, so that thread ranks and async code each have their own. Threads that a loss
# starts have none
_RUNNING: ContextVar[_Running] = ContextVar("_RUNNING", default=_Running())  # noqa: B039


@contextmanager
def _running(**changes: Any) -> Iterator[None]:
    token = _RUNNING.set(_RUNNING.get()._replace(**changes))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def hiding_trees() -> AbstractContextManager[None]:
    """Around a sharded loss or evaluation, which is given lazy parameters: refuse to read sharded
    trees."""
    return _running(hides_trees=True)


def are_trees_hidden() -> bool:
    """Whether a sharded loss or evaluation runs in this thread."""
    return _RUNNING.get().hides_trees


def running_a_loss(rank: int | None) -> AbstractContextManager[None]:
    """Around a call of a loss whose gradient is taken.

    Args:
        rank: for errors, if one is given.

    Raises:
        StructureError: another such loss runs.
    """
    # The other functions that take gradients ask before they begin
    refuse_gradient("a training step was called")
    return _running(is_loss=True, rank=rank)


def refuse_gradient(what: str) -> None:
    """Raise if a loss runs: its own gradient would not go through one that is taken here.

    Args:
        what: asked for it, as a clause.
    """
    refuse(what, _BY_TORCH)


def refuse_update(what: str) -> None:
    """Raise if a loss runs: an optimizer's update, or the addition of one, has no place in it.

    Args:
        what: asked for it, as a clause.
    """
    refuse(what, _AS_EXPRESSION)


def refuse(what: str, remedy: str) -> None:
    """Raise if a loss runs.

    Args:
        what: was done, as a clause.
        remedy: as in `explain`.
    """
    running = _RUNNING.get()
    if running.is_loss:
        raise StructureError(
            f"{what} inside of a loss whose own gradient is taken, and would be no part of it, "
            "since the results have no graph",
            rank=running.rank,
            remedy=remedy,
        )


_BY_TORCH = (
    "take the inner gradient by torch: whole = fz.unshard(params), and then "
    "torch.func.grad(inner_loss)(whole, ...), or torch.autograd.grad(..., create_graph=True) by "
    "its leaves; or take it before the loss, and pass the loss what comes of it. " + OF_THIS_RANK
)
_AS_EXPRESSION = (
    "call it after fz.value_and_grad, outside of the loss; in the loss write the update as an "
    "expression, tree_map(lambda p, u: p + u, params, updates)"
)
