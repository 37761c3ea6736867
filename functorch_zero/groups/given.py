"""What a user may give for a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from .hybrid import HybridGroup
from .process import ProcessGroup
from .protocol import Group
from .torch_group import parent_group, part_of, rows_of_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def as_group(group: Group | dist.ProcessGroup | DeviceMesh | None) -> Group:
    """`group` itself if it is a `Group`, else a `ProcessGroup` over torch's group or mesh (None: all ranks).

    A mesh of two dims, (replicate, shard), becomes a `HybridGroup`.
    """
    if isinstance(group, Group):
        return group
    if group is not None and (rows := rows_of_mesh(group)) is not None:
        everyone = sorted(rank for row in rows for rank in row)
        parent = part_of(parent_group(None), everyone)
        return HybridGroup.of_rows(ProcessGroup(parent), [[everyone.index(rank) for rank in row] for row in rows])
    return ProcessGroup(group)
