"""One rank's share of a state, to be saved."""

from __future__ import annotations

import copy
import platform
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..layout.layout import Layout
from ..model.untouched import versions_of
from ..optim.naming import described
from ..step.state import State
from .contents import (
    Contents,
    Part,
    ShardedStep,
    Step,
    contents_of,
    group_of,
    names_in,
    optimizer_of,
    parts_to_save,
)
from .device_copies import DeviceCopies
from .errors import CheckpointError
from .plain_data import encoded


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
    """This rank's share of a state. Its tensors must not be written to until it is on disk."""

    contents: Contents  # the whole state's leaves, with this rank's tensors
    parts: list[Part]  # the elements that this rank saves
    step: int
    level: int | None  # None: the state is unsharded
    user: Any  # plain JSON data
    about: dict[str, Any]  # for people, see `Manifest.about`
    versions: list[int]  # of the parts' tensors, when the snapshot was made
    progress: Progress = field(default_factory=Progress)
    copies: DeviceCopies = field(default_factory=DeviceCopies)  # under way to the parts' tensors

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if a tensor was written to since the snapshot was made."""
        now = versions_of([part.tensor for part in self.parts])
        for part, before, after in zip(self.parts, self.versions, now, strict=True):
            if before != after:
                path = self.contents.held[part.leaf].path
                raise CheckpointError(
                    f"{path} was changed in place while it was being saved. Remedy: don't write to "
                    "a state's tensors, or wait for the save first"
                )

    def copied(self) -> Snapshot:
        """The snapshot in CPU tensors of its own: a copy of this rank's share, nothing else.
        Those of a GPU are still under way."""
        copies = DeviceCopies()
        own = copies.start(part.flat() for part in self.parts)  # (numel,), in the leaf's dtype
        pairs = zip(self.parts, own, strict=True)
        parts = [part._replace(tensor=copy, first=0) for part, copy in pairs]
        # The copies' own versions: the old ones belong to the tensors left behind
        versions = versions_of([part.tensor for part in parts])
        return replace(self, parts=parts, versions=versions, copies=copies)


def snapshot_of(step: Step, state: State, user: Any) -> Snapshot:
    """This rank's share of a state, as references to its tensors."""
    # References only: nothing is copied, and no collective runs
    contents = contents_of(step, state)
    group = group_of(step)
    parts = parts_to_save(contents.held, group.rank, group.size)
    tensors = [part.tensor for part in parts]
    num_bytes = sum(part.nbytes for part in parts)
    return Snapshot(
        contents,
        parts,
        step=int(state.step),
        level=step.level if isinstance(step, ShardedStep) else None,
        user=checked_user(user),
        about=_about(step, state),
        versions=versions_of(tensors),
        progress=Progress(total=num_bytes),
    )


def devices_of(snapshot: Snapshot) -> set[torch.device]:
    """The GPUs on which its tensors lie."""
    return {part.tensor.device for part in snapshot.parts if part.tensor.is_cuda}


def checked_user(user: Any) -> Any:
    """A copy of the user's own data, which must come back from JSON as it went in.

    Raises:
        TypeError: it doesn't.
    """
    try:
        encoded(user, "user")
    except RecursionError:
        raise TypeError("user is nested too deep, or in itself") from None
    # The caller may change it while it is being saved
    return copy.deepcopy(user)


def _about(step: Step, state: State) -> dict[str, Any]:
    """The manifest's entry for people, and for exports: versions, optimizer, units and names."""
    optimizer = optimizer_of(step)
    units = {} if state.sharding is None else _units(state.sharding.layout)
    names = {}
    for path, known in names_in(state).items():
        if known.aliases or known.unsaved:
            names[path] = {"aliases": known.aliases, "unsaved": sorted(known.unsaved)}
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "units": units,
        "names": names,
    }
    if optimizer is not None:
        about["optimizer"] = {
            "printed": repr(optimizer),
            "name": optimizer.name,
            "hyperparams": described(optimizer.hyperparams),
        }
    return about


def _units(layout: Layout) -> dict[str, list[str]]:
    """The paths of each unit's leaves, by the unit's name."""
    units: dict[str, list[str]] = {}
    for unit in layout.units:
        units[unit.name] = []
        for b in unit.buckets:
            units[unit.name] += [layout.leaves[n].path for n in layout.buckets[b].leaves]
    return units
