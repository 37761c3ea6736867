"""torch's DTensors: which ranks they are cut over, and how; and the ways in and out of one.

A model may have params on a mesh and on parts of it: with `fully_shard` over tensor parallelism,
those that the plan doesn't name lie along one axis. They are the same along the other one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import StructureError
from ..tree import dtensor_class, is_dtensor
from .mesh import as_group
from .process import ProcessGroup
from .protocol import Group
from .single import SingleRank
from .torch_distributed import parent_group, part_of

_SUPPORTED = (
    "plain tensors, and DTensors that are replicated or cut along dims, as fully_shard, HSDP and "
    "tensor parallelism cut them"
)


class Placed(NamedTuple):
    """How torch has put some leaves on ranks.

    Attributes:
        everyone: all ranks of their mesh.
        group: the ranks over which leaves are cut; those of one replica, where there are several.
        sizes: of the axes of `group`, along which its ranks are numbered, the last one fastest.
        cuts: by path, (axis, dim), one after the other: the dim is cut along that axis.
        mesh: torch's, of the DTensors that `sharded_by_rows` makes; None: all leaves are plain.
        axes: of all of the mesh's, those of `sizes`.
    """

    everyone: Group
    group: Group
    sizes: tuple[int, ...]
    cuts: dict[str, tuple[tuple[int, int], ...]]
    mesh: Any
    axes: tuple[int, ...]


def local_of(x: Any) -> Tensor:
    """The tensor that is on this rank: a DTensor's own, or the tensor itself. Without grad."""
    return locals_of([x])[0]


def locals_of(leaves: Iterable[Any]) -> list[Tensor]:
    """The tensors that are on this rank; without a call per plain tensor, at every step."""
    dtensor = dtensor_class()
    return [x.to_local() if isinstance(x, dtensor) else x for x in leaves]


def like_dtensor(local: Tensor, like: Any) -> Tensor:
    """A tensor that lies as the local part of `like` does, as a DTensor like it."""
    if not is_dtensor(like):
        return local
    return _from_local(local, like.device_mesh, like.placements, like.shape)


def sharded_by_rows(local: Tensor, shape: tuple[int, ...], placed: Placed) -> Tensor:
    """Rows of a tensor of this shape, cut over `placed.group`, as a DTensor."""
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = [Replicate()] * placed.mesh.ndim
    for axis in placed.axes:
        placements[axis] = Shard(0)
    return _from_local(local, placed.mesh, placements, shape)


def _from_local(local: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    whole = torch.empty(shape, device="meta")
    made: Tensor = DTensor.from_local(
        *(local, mesh, placements), run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def placed(leaves: Mapping[str, Tensor]) -> Placed:
    """How these leaves lie on ranks. Makes groups: every rank of the mesh calls it.

    Raises:
        StructureError: a leaf's placement, or its mesh, is none that is supported; by path.
    """
    dtensors: dict[str, Any] = {path: x for path, x in leaves.items() if is_dtensor(x)}
    if not dtensors:
        alone = SingleRank()
        return Placed(alone, alone, (1,), dict.fromkeys(leaves, ()), None, ())
    first = max(dtensors, key=lambda path: dtensors[path].device_mesh.ndim)
    mesh = dtensors[first].device_mesh
    cuts = {path: _cuts_of(path, x, first, mesh) for path, x in dtensors.items()}
    axes = tuple(sorted({axis for own in cuts.values() for axis, _ in own}))
    by_path: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(leaves, ())
    for path, own in cuts.items():
        by_path[path] = tuple((axes.index(axis), dim) for axis, dim in own)
    own_ranks = _ranks_along(axes, mesh)
    everyone = _group_of(mesh.mesh)
    group = everyone if own_ranks.numel() == mesh.mesh.numel() else _group_of(own_ranks)
    sizes = tuple(mesh.size(axis) for axis in axes) or (1,)
    return Placed(everyone, group, sizes, by_path, mesh, axes)


def _cuts_of(path: str, leaf: Any, first: str, mesh: Any) -> list[tuple[int, int]]:
    """(axis of the mesh, dim) of a leaf, in the order in which torch cuts.

    Args:
        first: the path of a leaf that lies on all of `mesh`.
    """
    own = leaf.device_mesh
    axes = _axes_in(own, mesh)
    if axes is None:
        raise StructureError(
            f"params lie on different meshes: that of {first} is {mesh}",
            path=path,
            expected="the same mesh, or some of its axes by name",
            got=own,
            remedy="one optimizer for each mesh, optim.to_torch(transform, "
            "dict(part.named_parameters()))",
        )
    cuts: list[tuple[int, int]] = []
    later: list[tuple[int, int]] = []
    for axis, placement in zip(axes, leaf.placements, strict=True):
        # torch cuts along this axis last: a piece of fully_shard in one of tensor parallelism
        strided = getattr(placement, "split_factor", None)
        if placement.is_replicate():
            continue
        if not placement.is_shard() and strided is None:
            _refuse(path, leaf)
        (cuts if strided is None else later).append((axis, placement.dim % leaf.ndim))
        if strided is not None:
            rows = zip(axes, leaf.placements, strict=True)
            inside = [mesh.size(a) for a, p in rows if a > axis and p.is_shard(placement.dim)]
            if strided != prod(inside):
                _refuse(path, leaf)
    return cuts + later


def _refuse(path: str, leaf: Any) -> None:
    raise StructureError(
        "a param has a placement that optim.to_torch doesn't know",
        path=path,
        expected=_SUPPORTED,
        got=leaf.placements,
        remedy="redistribute it, or leave it to another optimizer",
    )


def _axes_in(own: Any, mesh: Any) -> list[int] | None:
    """The numbers that the axes of a mesh have in another one; None if it is no part of that."""
    if own == mesh:
        return list(range(mesh.ndim))
    names, all_names = own.mesh_dim_names, mesh.mesh_dim_names
    if not names or not all_names or not set(names) <= set(all_names):
        return None
    axes = [all_names.index(name) for name in names]
    # In the order of the whole mesh, as its part is
    is_part = axes == sorted(axes) and _ranks_along(axes, mesh).equal(own.mesh)
    return axes if is_part else None


def _ranks_along(axes: Collection[int], mesh: Any) -> Tensor:
    """The ranks of the mesh that differ from this one along these axes alone."""
    place = enumerate(mesh.get_coordinate())
    ranks: Tensor = mesh.mesh[tuple(slice(None) if axis in axes else n for axis, n in place)]
    return ranks


def _group_of(ranks: Tensor) -> Group:
    """The group of these ranks of the world, numbered in this order."""
    numbers = ranks.reshape(-1).tolist()
    if len(numbers) == 1:
        return SingleRank()
    if numbers != sorted(numbers):
        raise StructureError(
            "a mesh numbers its ranks in another order than the world does",
            expected=sorted(numbers),
            got=numbers,
            remedy="init_device_mesh makes one in order",
        )
    return ProcessGroup(part_of(parent_group(None), numbers))


def unwrapped(model: nn.Module) -> tuple[nn.Module, Group]:
    """The module inside of DistributedDataParallel, with the group of its ranks, and of
    torch.compile; others as they are, alone."""
    group: Group = SingleRank()
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            group = as_group(model.process_group)
            model = model.module
        elif isinstance(inside := getattr(model, "_orig_mod", None), nn.Module):
            model = inside
        else:
            return model, group


def reshard(model: nn.Module) -> None:
    """Let the modules of `fully_shard` inside free the whole params that they have gathered."""
    # As in `is_dtensor`: whoever has one has imported it
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
