"""Exceptions and warnings. A message names the fault, its path, the expected and the actual value,
the rank, and the remedy."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TypedDict, Unpack

import optree
import torch

__all__ = [
    "DonatedError",
    "EqualBatchesWarning",
    "FunctorchZeroError",
    "GroupError",
    "LostBuffersWarning",
    "LostPeerError",
    "MismatchError",
    "NonFiniteError",
    "PeerError",
    "StructureError",
    "TransformError",
    "UnequalBatchesWarning",
]


def explain(
    what: str,
    *,
    path: str | None = None,
    expected: object = None,
    got: object = None,
    rank: int | None = None,
    remedy: str | None = None,
) -> str:
    """Format one error message; every part that is None is left out.

    Args:
        what: the fault, as a clause without a full stop.
        path: the leaf's dotted path; "" is the root.
        expected: the value that would do.
        got: the value that was found.
        rank: the rank that found it.
        remedy: the user's next move, as a clause without a full stop.

    >>> print(explain("the shape differs", path="w", expected=(3, 4), got=(4, 3), rank=1))
    the shape differs: path w, expected (3, 4), got (4, 3), on rank 1.
    """
    # An empty path is the root's, and no missing one
    root = "(root)" if path == "" else path
    facts = {"path": root, "expected": expected, "got": got, "on rank": rank}
    told = ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact is not None)
    text = f"{what}: {told}." if told else f"{what}."
    if remedy:
        text += f" Remedy: {remedy}."
    return text


def first_few(texts: Sequence[str], most: int) -> str:
    """The first texts, and the number of the rest.

    >>> first_few(["a", "b", "c", "d"], 2)
    'a, b, and 2 more'
    """
    rest = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *rest])


# Where functions are that stand between a user and a step: folders, and files
_INSIDE = (
    *(os.path.dirname(file or "") + os.sep for file in (__file__, torch.__file__, optree.__file__)),
    contextlib.__file__,
    "<frozen",
)


def users_frames() -> list[tuple[FrameType, int]]:
    """The frames that led here and are the user's, from the innermost one outwards, each with its
    number among all, the caller's being 1."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    rows = [(frame, number) for number, frame in enumerate(frames, 1)]
    return [row for row in rows if not row[0].f_code.co_filename.startswith(_INSIDE)]


def users_line() -> str:
    """The user's line that led here, for errors: " (train.py:12)"."""
    for frame, _ in users_frames():
        return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
    return ""


def warn(text: str, category: type[Warning]) -> None:
    """Warn, at the user's line that led here: the innermost one outside of this package."""
    levels = [number for _, number in users_frames()]
    warnings.warn(text, category, stacklevel=levels[0] if levels else 1)


def check_choice(option: str, value: object, choices: Iterable[object]) -> None:
    """Raise ValueError unless the value of an option is one of these."""
    known = (*choices,)
    if value not in known:
        raise ValueError(f"{option} must be one of {known}, got {value!r}")


class Facts(TypedDict, total=False):
    """The facts of an error, as `explain` takes them."""

    path: str | None
    expected: object
    got: object
    rank: int | None
    remedy: str | None


class FunctorchZeroError(Exception):
    """The base class of all errors of this library.

    Args:
        what: the message; with facts, the fault that `explain` tells with them.
    """

    def __init__(self, what: str = "", **facts: Unpack[Facts]):
        super().__init__(explain(what, **facts) if facts else what)


class StructureError(FunctorchZeroError, ValueError):
    """A tree, a leaf or a batch differs from those that the step was built for."""


class TransformError(FunctorchZeroError, ValueError):
    """A transform does something that its `needs` rules out."""


class MismatchError(FunctorchZeroError, ValueError):
    """The ranks were given different things: models, dtypes, optimizers, options."""


class NonFiniteError(FunctorchZeroError, ArithmeticError):
    """A step's loss or gradients have a NaN or an infinity, and `nonfinite="raise"`. Raised on
    every rank."""


class DonatedError(FunctorchZeroError, RuntimeError):
    """A state was used after a step had taken its storage."""


class GroupError(FunctorchZeroError, RuntimeError):
    """A collective failed, timed out, or was called differently on different ranks."""


class PeerError(GroupError):
    """Another rank failed; the message carries that rank's number and its error."""


class LostPeerError(GroupError):
    """Another rank was killed, is stuck or can't be reached. Inside a step, the message names the
    unit and the phase."""


class UnequalBatchesWarning(UserWarning):
    """Ranks' batches or micro-batches have unequal sizes, and count the same in means. A step says
    so once."""


class EqualBatchesWarning(UserWarning):
    """All ranks are given the same batch, step after step. A step says so once."""


class LostBuffersWarning(UserWarning):
    """`apply` has changed buffers that the loss was given, and the loss returns no buffers. A step
    says so once."""
