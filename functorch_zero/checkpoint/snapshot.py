"""One rank's share of a state, to be saved."""

from __future__ import annotations

import copy
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..layout.layout import Layout
from ..model.untouched import versions_of
from ..optim.naming import described
from ..sharded.program.step import ShardedStep
from ..step.state import State
from .contents import (
    Contents,
    LocalLeaf,
    Run,
    Step,
    contents_of,
    frozen_in,
    group_of,
    names_in,
    optimizer_of,
    runs_to_save,
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

    contents: Contents  # the leaves to save, with this rank's tensors
    left_out: list[LocalLeaf]  # the frozen params, if they are left out
    runs: list[Run]  # the elements that this rank saves
    step: int
    level: int | None  # None: the state is unsharded, or its levels are by leaf
    user: Any  # plain JSON data
    about: dict[str, Any]  # for people, see `Manifest.about`
    versions: list[int]  # of `_tensors`, when the snapshot was made
    progress: Progress = field(default_factory=Progress)
    copies: DeviceCopies = field(default_factory=DeviceCopies)  # under way to the runs' tensors

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if a tensor was written to since the snapshot was made."""
        now = versions_of(_tensors(self.runs, self.left_out))
        leaves = [self.contents.leaves[run.leaf] for run in self.runs] + self.left_out
        for leaf, before, after in zip(leaves, self.versions, now, strict=True):
            if before != after:
                raise CheckpointError(
                    f"{leaf.path} was changed in place while it was being saved. Remedy: don't "
                    "write to a state's tensors, or wait for the save first"
                )

    def copied(self) -> Snapshot:
        """The snapshot in CPU tensors of its own: a copy of this rank's share, nothing else.
        Those of a GPU are still under way. Frozen params that are left out are not copied: no step
        writes to them."""
        copies = DeviceCopies()
        own = copies.start(run.flat() for run in self.runs)  # (numel,), in the leaf's dtype
        pairs = zip(self.runs, own, strict=True)
        runs = [run._replace(tensor=copy, first=0) for run, copy in pairs]
        # The copies' own versions: the old ones belong to the tensors left behind
        versions = versions_of(_tensors(runs, [])) + self.versions[len(runs) :]
        return replace(self, runs=runs, versions=versions, copies=copies)


def _tensors(runs: Sequence[Run], left_out: Sequence[LocalLeaf]) -> list[Tensor]:
    """The tensors that a save reads."""
    return [run.tensor for run in runs] + [local.tensor for local in left_out]


def snapshot_of(step: Step, state: State, user: Any, *, frozen: bool = True) -> Snapshot:
    """This rank's share of a state, as references to its tensors. `frozen`: as of `save`."""
    # References only: nothing is copied, and no collective runs
    contents = contents_of(step, state)
    left_out: list[LocalLeaf] = []
    if not frozen:
        names = frozen_in(step, state)
        left_out = [local for local in contents.leaves if local.path in names]
        contents = contents._replace(leaves=[h for h in contents.leaves if h.path not in names])
    group = group_of(step)
    runs = runs_to_save(contents.leaves, group.rank, group.size)
    num_bytes = sum(run.nbytes for run in runs)
    return Snapshot(
        contents,
        left_out,
        runs,
        step=int(state.step),
        level=step.level if isinstance(step, ShardedStep) else None,
        user=checked_user(user),
        about=_about(step, state),
        versions=versions_of(_tensors(runs, left_out)),
        progress=Progress(total=num_bytes),
    )


def devices_of(snapshot: Snapshot) -> set[torch.device]:
    """The GPUs on which its tensors lie."""
    tensors = _tensors(snapshot.runs, snapshot.left_out)
    return {tensor.device for tensor in tensors if tensor.is_cuda}


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
    """The manifest's entry for people, and for exports: versions, optimizer, units,
    names and frozen params."""
    optimizer = optimizer_of(step)
    units = {} if state.sharding is None else _units(state.sharding.layout)
    names = {
        path: {"aliases": known.aliases, "unsaved": sorted(known.unsaved)}
        for path, known in names_in(state).items()
        if known.aliases or known.unsaved
    }
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "units": units,
        "names": names,
    }
    if optimizer is not None:
        about["frozen"] = sorted(frozen_in(step, state))
        about["optimizer"] = {
            "printed": repr(optimizer),
            "name": optimizer.name,
            "hyperparams": described(optimizer.hyperparams),
        }
    return about


def _units(layout: Layout) -> dict[str, list[str]]:
    """The paths of each unit's leaves, by the unit's name."""
    return {
        unit.name: [layout.leaves[n].path for n in content.leaves]
        for unit, content in zip(layout.units, layout.contents, strict=True)
    }
