"""Batches and states that a sharded step refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DonatedError, StructureError
from ..layout.sharding import Sharding
from ..step.rows import opened, opened_by_path
from .options import Options, StatePlace


def check_batch(batch: Any, device: torch.device, rank: int) -> None:
    """Refuse a batch on another kind of device than the params; single numbers may be anywhere."""
    # Paths are made for the error alone: a step checks each batch
    for n, leaf in enumerate(opened(batch)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.device.type != device.type:
            path, _ = opened_by_path(batch)[n]
            raise StructureError(
                "the batch is on the wrong device",
                path=path,
                expected=device,
                got=leaf.device,
                rank=rank,
                remedy="move it with tree_map(lambda x: x.to(device), batch)",
            )


def check_place(sharding: Sharding | None, options: Options) -> None:
    """Raise unless a state of this sharding is cut as these options cut, and for this rank."""
    if sharding is None:
        raise StructureError(
            "a sharded step was given a whole state. Remedy: `step.shard(state)` first"
        )
    # Of this very place in the mesh: another rank's part would fit in shape alone
    got = StatePlace(
        level=sharding.level,
        num_pieces=sharding.layout.num_ranks,
        rank=sharding.rank,
        mesh=sharding.mesh,
        level_in_words=sharding.level_in_words,
    )
    if got != options.place:
        raise StructureError(
            "the state was sharded for another level, group or rank",
            expected=options.place,
            got=got,
            rank=options.group.rank,
            remedy="unshard it with the step that made it, then shard it with this one",
        )


def donated_state(step: Tensor) -> DonatedError:
    """The error of a state of this number, of which a step has taken the storage of a node."""
    # Who took it may have failed since, so no state need have come of it
    return DonatedError(
        f"the state of step {int(step)} was donated to a step or a load, which has "
        "written over its storage. Remedy: use the state that it returned; if it failed, load "
        "the newest checkpoint. To keep a state, copy it with tree_map(torch.clone, state), or "
        "shard with donate=False"
    )
