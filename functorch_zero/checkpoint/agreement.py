"""Work done in part by every rank, which fail together: an error on one rank is the same error on
all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import DonatedError, MismatchError, StructureError
from ..groups import labelled
from ..groups.checks import by_rank
from ..groups.protocol import Group
from ..sharded.failures import sharing_failures
from ..sharded.words import exchange_data
from .errors import CheckpointError, CorruptError

# Errors that other ranks raise in the same kind; of any other they raise a CheckpointError
_OURS = (CheckpointError, CorruptError, DonatedError, MismatchError, StructureError)
# Name -> kind, as reports name them
KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in _OURS}


T = TypeVar("T")


class Together(NamedTuple, Generic[T]):
    """The results of work that all ranks have done."""

    own: T  # of this rank
    of_all: list[Any]  # of each rank, what it tells the others of its own


def _itself(result: Any) -> Any:
    return result


def nothing(result: object) -> None:
    """To tell the others, but that the work is done."""


def together(
    group: Group, what: str, work: Callable[[], T], tell: Callable[[T], Any] = _itself
) -> Together[T]:
    """Every rank's `work()`. One exchange of JSON.

    Args:
        group: the ranks; all of them call this.
        what: the work, for errors, its verb first: "save step 3 to /runs/a".
        work: this rank's part. It issues no collective.
        tell: what the others hear of its result, in plain data.

    Raises: when `work` raised on some ranks, one error on every rank, of the first one's kind,
        naming them all.
    """
    failure: Exception | None = None  # this rank's own, the cause of the error that all raise
    # By the verb alone: of folders that differ the work itself says more
    with sharing_failures(group, call=what.split()[0]):
        try:
            own = work()
            report: dict[str, Any] = {"ok": tell(own)}
        except Exception as error:
            failure = error
            report = {"error": type(error).__name__, "text": _words(error)}
        reports = exchange_data(labelled(group, what), report)
    failed = [report for report in reports if "error" in report]
    if failed:
        # The lowest failing rank decides the kind, so that all ranks raise the same one
        kind = KINDS.get(failed[0]["error"], CheckpointError)
        # Alone: no need to say which rank
        alone = group.size == 1
        texts = failed[0]["text"] if alone else by_rank(r.get("text", "") for r in reports)
        raise kind(f"could not {what}: {texts}") from failure
    return Together(own, [report["ok"] for report in reports])


def _words(error: Exception) -> str:
    """An error's text, with its kind where the other ranks will not raise that kind."""
    if type(error).__name__ in KINDS:
        return str(error)
    return f"{type(error).__name__}: {error}"
