"""What one rank saves of a state."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from ..model.lazy_param import versions_of
from ..optim.naming import described
from ..sharded.train import ShardedTrainStep
from ..step.state import State
from .contents import Contents, Part, Step, contents_of, group_of, parts_to_save, unsharded_of
from .errors import CheckpointError


@dataclass
class Progress:
    """How far a save is on this rank.

    Attributes:
        written: bytes handed to the operating system.
        total: bytes that this rank writes.
    """

    written: int = 0
    total: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What this rank saves. Its tensors must not be written to until it is on disk."""

    contents: Contents
    parts: list[Part]
    step: int
    level: int | None
    user: Any
    about: dict[str, Any]
    versions: list[int]  # of the parts' tensors
    progress: Progress = field(default_factory=Progress)

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if a tensor was written to since the snapshot was made."""
        now = versions_of([part.tensor for part in self.parts])
        for part, before, after in zip(self.parts, self.versions, now, strict=True):
            if before != after:
                raise CheckpointError(
                    f"{self.contents.held[part.leaf].path} was changed in place while it was "
                    "being saved. Remedy: don't write to a state's tensors, or wait for the save "
                    "first"
                )

    def copied(self) -> Snapshot:
        """The same in CPU tensors of its own: a copy of this rank's share, nothing else."""
        parts = [
            part._replace(tensor=part.flat().to("cpu", copy=True), first=0) for part in self.parts
        ]
        versions = versions_of([part.tensor for part in parts])
        return Snapshot(
            self.contents,
            parts,
            self.step,
            self.level,
            self.user,
            self.about,
            versions,
            self.progress,
        )


def snapshot_of(step: Step, state: State, user: Any) -> Snapshot:
    """This rank's share of a state, as references to its tensors."""
    contents, group = contents_of(step, state), group_of(step)
    parts = parts_to_save(contents.held, group.rank, group.size)
    return Snapshot(
        contents,
        parts,
        step=int(state.step),
        level=step.level if isinstance(step, ShardedTrainStep) else None,
        user=checked_user(user),
        about=_about(step, state),
        versions=versions_of([part.tensor for part in parts]),
        progress=Progress(0, sum(part.nbytes for part in parts)),
    )


def checked_user(user: Any) -> Any:
    """The user's own data, which must come back from JSON as it went in.

    Raises:
        TypeError: it doesn't.
    """
    try:
        same = json.loads(json.dumps(user, allow_nan=False)) == user
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"user must be plain JSON data: {error}") from None
    if not same:
        raise TypeError(
            "user must come back from JSON as it is: with lists instead of tuples, and strings as "
            "keys"
        )
    return user


def _about(step: Step, state: State) -> dict[str, Any]:
    units = {}
    if state.sharding is not None:
        layout = state.sharding.layout
        units = {
            unit.name: [
                layout.leaves[n].path for b in unit.buckets for n in layout.buckets[b].leaves
            ]
            for unit in layout.units
        }
    optimizer = unsharded_of(step).optimizer
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "optimizer": {
            "printed": repr(optimizer),
            "name": optimizer.name,
            "hyperparams": described(optimizer.hyperparams),
        },
        "units": units,
    }
