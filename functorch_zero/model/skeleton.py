"""A copy of the model whose places can be filled with leaves.

Note [captured skeletons]: something that runs a module again later, such as torch.utils.checkpoint
in backward, holds on to skeleton modules and must find the same values there. So values stay in a
skeleton after the call, and a skeleton is used again only when nothing outside refers to its
modules any more.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch_private import buffers_dict, params_dict
from ..params import UnitSpec
from ..precision import Precision
from ..profiling import ranged
from .buffer_copies import BufferCopy, copy_of
from .casting import Policies, cast_leaf
from .compile import CompiledForward
from .copying import functions_of
from .lazy_param import LazyParam
from .remat import recomputed
from .slots import Place, Slot, entering, leaves_for, put, tensors_in


class Anatomy(NamedTuple):
    """Where things are in a model: all that `apply` must know beside the module itself."""

    units: tuple[UnitSpec, ...]
    slots: list[Slot]  # of params
    buffer_slots: list[Slot]
    policies: Policies
    remat: frozenset[str] = frozenset()  # paths of the modules that are computed again in backward
    compiled: frozenset[str] = frozenset()  # and of those whose forward is a compiled region
    compile_options: Mapping[str, Any] = {}


class Skeleton:
    """A copy of the model whose places can be filled; see Note [captured skeletons]."""

    def __init__(self, root: nn.Module, anatomy: Anatomy):
        self.root = root
        self._policies: dict[str, Precision] = {}  # by leaf, of those that have one
        for unit in anatomy.units:
            self._policies |= unit.policies
        self._param_places = _places(root, anatomy.slots, params_dict)
        self._buffer_places = _places(root, anatomy.buffer_slots, buffers_dict)
        self._all_places = self._param_places + self._buffer_places
        self._empty = tensors_in(self._all_places)  # tensors on the meta device
        self._params: Mapping[str, Any] = {}  # those of the call, by path
        self._lazy = False  # whether the call's params have lazy ones, so that units are entered
        # Casts go inside: a unit's inputs are cast after it is entered, in its compiled region
        anatomy.policies.cast_calls(root)
        self._wrap_units(anatomy)
        self._held = [*root.modules(), *functions_of(root)]
        self._refs: list[int] = []  # references to each of `_held` while nothing runs

    def _wrap_units(self, anatomy: Anatomy) -> None:
        """Give the units' modules a forward that, from the outside in, is computed again in
        backward, enters the unit, and is compiled."""
        by_leaf: dict[str, list[Place]] = {}
        for place in self._param_places:
            by_leaf.setdefault(place.leaf, []).append(place)
        for unit in anatomy.units:
            inside: list[Place] = []
            for leaf in unit.leaves:
                inside += by_leaf.get(leaf, [])
            for path in unit.modules:
                module = self.root.get_submodule(path)
                if path in anatomy.compiled:
                    module.forward = CompiledForward(module.forward, anatomy.compile_options)
                module.forward = self._entering(path, inside, module.forward)
                if path in anatomy.remat:
                    module.forward = recomputed(module.forward, self._buffers_in(module))

    def _buffers_in(self, module: nn.Module) -> list[Place]:
        """The places of the buffers of a module and of those inside it."""
        inside = {id(buffers_dict(m)) for m in module.modules()}
        return [place for place in self._buffer_places if id(place.held) in inside]

    def settle(self) -> Skeleton:
        """Note how often modules and functions are referred to while nothing runs.

        Call it after `__init__`, whose frame and caller still refer to the root.
        """
        self._refs = self._count_refs()
        return self

    def _count_refs(self) -> list[int]:
        return list(map(sys.getrefcount, self._held))

    def is_free(self) -> bool:
        """Whether nothing but this skeleton refers to its modules and their functions."""
        return self._count_refs() == self._refs

    def bind(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor]
    ) -> dict[str, BufferCopy]:
        """Fill every place; buffers with copies, which are returned."""
        self._params = params
        kinds = {type(leaf) for leaf in params.values()}
        self._lazy = LazyParam in kinds
        leaves = leaves_for(self._param_places, params)
        # A lazy leaf has its policy's dtype already, and is cast when it is entered
        if self._policies and kinds != {LazyParam}:
            for i, place in enumerate(self._param_places):
                leaves[i] = self._as_used(place.leaf, leaves[i])
        put(self._param_places, leaves)
        return self._put_copies(buffers)

    def _as_used(self, path: str, leaf: Any) -> Any:
        """A leaf that was given whole, in the dtype that its module computes with."""
        policy = self._policies.get(path)
        if policy is None or type(leaf) is LazyParam:
            return leaf
        return cast_leaf(leaf, policy.dtypes(leaf.dtype))

    def release(self, buffers: Mapping[str, Tensor]) -> None:
        """Let go of the values, unless something still refers to a module and may yet run it.

        Then it finds the params there, and copies of the buffers that the call was given. It may
        change those: nobody reads them.
        """
        if self.is_free():
            self._params = {}
            put(self._all_places, self._empty)
        else:
            self._put_copies(buffers)

    def _put_copies(self, buffers: Mapping[str, Tensor]) -> dict[str, BufferCopy]:
        """Copies in the places of buffers, since modules write to theirs; they are returned."""
        taken = {path: copy_of(buffer) for path, buffer in buffers.items()}
        tensors = {path: copied.tensor for path, copied in taken.items()}
        put(self._buffer_places, leaves_for(self._buffer_places, tensors))
        return taken

    def new_buffers(
        self, old: Mapping[str, Tensor], taken: Mapping[str, BufferCopy]
    ) -> dict[str, Tensor]:
        """The buffers after the call: the old tensors where nothing changed."""
        new = dict(old)
        for place, buffer in zip(self._buffer_places, tensors_in(self._buffer_places), strict=True):
            if taken[place.leaf].is_changed(buffer):
                new[place.leaf] = buffer.detach()
        return new

    def _entering(self, path: str, inside: list[Place], forward: Callable[..., Any]) -> Any:
        """The same function, entering the unit of the module of this path where leaves are lazy."""

        @functools.wraps(forward)
        def enter_and_run(*args: Any, **kwargs: Any) -> Any:
            run = forward
            with ranged("forward", path or "root"):
                if self._lazy:
                    run = entering(path, inside, self._params, forward)
                return run(*args, **kwargs)

        return enter_and_run


def _places(
    root: nn.Module, slots: list[Slot], held_by: Callable[[nn.Module], dict[str, Any]]
) -> list[Place]:
    """The places of these slots in the modules of `root`, in the same order."""
    places = []
    for slot in slots:
        module = root.get_submodule(slot.module)
        places.append(Place(held_by(module), slot.attribute, slot.leaf))
    return places
