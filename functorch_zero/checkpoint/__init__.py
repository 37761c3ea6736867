"""Checkpoints that load at any level, world size and choice of units, and say so when they are
damaged."""

from .catalogue import keep, latest, verify
from .convert import export, import_
from .dcp import export_dcp, import_dcp
from .errors import CheckpointError, CheckpointWarning, CorruptError
from .load import Restored, load
from .save import Saving, async_save, save, wait_for_saves
from .snapshot import Progress

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "CorruptError",
    "Progress",
    "Restored",
    "Saving",
    "async_save",
    "export",
    "export_dcp",
    "import_",
    "import_dcp",
    "keep",
    "latest",
    "load",
    "save",
    "verify",
    "wait_for_saves",
]
