"""Telling the other ranks when this one fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import GroupError, NonFiniteError
from ..groups import check_same_call, rejoin, settle
from ..groups.protocol import Group


@contextmanager
def sharing_failures(
    *groups: Group, call: str = "", step: Any = None, settles: bool = False
) -> Iterator[None]:
    """Tell the other ranks when this one fails, so that no rank waits for it.

    Groups that have failed before take part again: a caller may catch an error and go on.

    Args:
        groups: of more than one rank each; that of all ranks comes first.
        call: the call inside, in words. Ranks that come back to different calls raise. "": none,
            so that the next call with words is compared.
        step: the number of the state that the call is given, compared as `call` is; None: it is
            given no state, or something that it will refuse.
        settles: whether the call ends without a word of the other ranks, so that it must wait until
            its results are right; see `settle`.
    """
    # Nothing happens where nothing has failed; else all ranks meet here
    for group in groups:
        rejoin(group)
    try:
        # A rank alone has no groups
        if call and groups:
            own = (lambda: call) if step is None else (lambda: f"{call} at step {int(step)}")
            check_same_call(groups[0], own)
        yield
        if settles:
            for group in groups:
                settle(group)
    except NonFiniteError:
        raise  # on every rank, after the call's last collective: no rank waits, so none is told
    # An interrupt, too: the others would wait for this rank until the group's time limit
    except BaseException as error:
        # One group's error is known to its ranks, but not to those that share another group
        is_known = isinstance(error, GroupError) and len(groups) == 1
        if not is_known:
            for group in groups:
                group.fail(error)
        raise


@contextmanager
def propagate_failures(step: Any) -> Iterator[None]:
    """Around a training loop: when it raises on this rank, outside of a step too, the other ranks
    raise `PeerError`.

    Steps, saves and loads tell the other ranks by themselves. After a failure between them (one
    rank can't read a file, say) the others would wait: until this rank's process ends, or for the
    group's time limit.

        with fz.propagate_failures(step):
            for batch in batches:
                state, metrics = step(state, batch)

    Args:
        step: a sharded train or eval step, or a program's.
    """
    with sharing_failures(*step.options.axes.groups), step.engine.forgetting_orders():
        yield
