"""Checkpoints that load at any level, world size and choice of units, and say so when they are
damaged."""

from .catalogue import latest, prune, verify
from .convert import export_weights, import_weights
from .dcp import export_dcp, import_dcp
from .errors import CheckpointError, CheckpointWarning, CorruptError
from .load import Restored, load
from .save import Saving, async_save, save, wait_for_saves
from .snapshot import Progress
from .whole_leaves import leaves

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "CorruptError",
    "Progress",
    "Restored",
    "Saving",
    "async_save",
    "export_dcp",
    "export_weights",
    "import_dcp",
    "import_weights",
    "latest",
    "leaves",
    "load",
    "prune",
    "save",
    "verify",
    "wait_for_saves",
]
