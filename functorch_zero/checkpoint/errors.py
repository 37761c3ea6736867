"""Exceptions and warnings of checkpoints."""

from __future__ import annotations

from ..errors import FunctorchZeroError


class CheckpointError(FunctorchZeroError, RuntimeError):
    """A checkpoint could not be saved, found or read. Every rank raises it with the same words,
    which name the rank."""


class CorruptError(CheckpointError):
    """A checkpoint is damaged; the message names the file."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over because it is damaged."""
