"""A copy of the model whose places can be filled with leaves.

Note [captured skeletons]: something that runs a module again later, such as torch.utils.checkpoint
in backward, holds on to skeleton modules and must find the same values there. So values stay in a
skeleton after the call, and a skeleton is used again only when nothing outside refers to its
modules any more.

Note [changed buffers]: a version counter says whether a buffer was written to, except that torch's
batch_norm writes its running statistics without counting. So floating-point buffers are compared,
on the CPU; elsewhere comparing would wait for the device, and they count as changed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch_private import buffers_dict, params_dict, transforms_active, version_of
from ..params import UnitSpec
from ..profiling import ranged
from .casting import Policies, cast_leaf
from .compile import CompiledForward
from .copying import functions_of
from .lazy_param import LazyParam
from .remat import recomputed
from .slots import Place, Slot, entering, found, put, used


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
        at = root.get_submodule
        self._policies = {
            leaf: policy for unit in anatomy.units for leaf, policy in unit.policies.items()
        }
        anatomy.policies.cast_calls(root)
        self._slots: list[Place] = [
            (params_dict(at(s.module)), s.attribute, s.leaf) for s in anatomy.slots
        ]
        self._buffer_slots: list[Place] = [
            (buffers_dict(at(s.module)), s.attribute, s.leaf) for s in anatomy.buffer_slots
        ]
        self._places = self._slots + self._buffer_slots
        self._empty = found(self._places)
        self._params: Mapping[str, Any] = {}
        self._lazy = False
        by_leaf: dict[str, list[Place]] = {}
        for place in self._slots:
            by_leaf.setdefault(place[2], []).append(place)
        for unit in anatomy.units:
            inside = [place for leaf in unit.leaves for place in by_leaf.get(leaf, ())]
            for path in unit.modules:
                module = root.get_submodule(path)
                if path in anatomy.compiled:
                    module.forward = CompiledForward(module.forward, anatomy.compile_options)
                module.forward = self._entering(path, inside, module.forward)
                if path in anatomy.remat:
                    within = {id(buffers_dict(m)) for m in module.modules()}
                    places = [place for place in self._buffer_slots if id(place[0]) in within]
                    module.forward = recomputed(module.forward, places)
        self._held = [*root.modules(), *functions_of(root)]
        self._refs: list[int] = []

    def settle(self) -> Skeleton:
        """Note how often modules and functions are referred to while nothing runs. Call it outside
        `__init__`."""
        self._refs = self._count_refs()
        return self

    def _count_refs(self) -> list[int]:
        return [*map(sys.getrefcount, self._held)]

    def is_free(self) -> bool:
        """Whether nothing but this skeleton refers to its modules and their functions."""
        return self._count_refs() == self._refs

    def bind(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, int | None]]:
        """Fill every place; buffers with copies, which are returned with their versions."""
        self._params = params
        kinds = {*map(type, params.values())}
        self._lazy = LazyParam in kinds
        leaves = used(self._slots, params)
        if self._policies and kinds != {LazyParam}:
            leaves = [
                self._as_used(path, leaf)
                for (_, _, path), leaf in zip(self._slots, leaves, strict=True)
            ]
        put(self._slots, leaves)
        return {
            path: (copied, _version(copied)) for path, copied in self._put_copies(buffers).items()
        }

    def _as_used(self, path: str, leaf: Any) -> Any:
        """A leaf that was given whole, in the dtype it is used in; a lazy one gives it so when it
        is entered."""
        policy = self._policies.get(path)
        return (
            leaf
            if policy is None or type(leaf) is LazyParam
            else cast_leaf(leaf, policy.dtypes(leaf.dtype))
        )

    def release(self, buffers: Mapping[str, Tensor]) -> None:
        """Let go of the values, unless something still refers to a module and may yet run it.

        Then it finds the params there, and copies of the buffers that the call was given: what it
        makes of them is nobody's.
        """
        if self.is_free():
            self._params = {}
            put(self._places, self._empty)
        else:
            self._put_copies(buffers)

    def _put_copies(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {path: buffer.clone() for path, buffer in buffers.items()}
        for attributes, name, leaf in self._buffer_slots:
            attributes[name] = copies[leaf]
        return copies

    def new_buffers(
        self, old: Mapping[str, Tensor], taken: dict[str, tuple[Tensor, int | None]]
    ) -> dict[str, Tensor]:
        """The buffers after the call: the old tensors where nothing changed."""
        new = dict(old)
        for attributes, name, leaf in self._buffer_slots:
            buffer, (copied, version) = attributes[name], taken[leaf]
            if (
                buffer is not copied
                or _version(copied) != version
                or _may_differ(copied, old[leaf])
            ):
                assert isinstance(buffer, Tensor)
                new[leaf] = buffer.detach()
        return new

    def _entering(self, path: str, inside: list[Place], forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def enter_and_run(*args: Any, **kwargs: Any) -> Any:
            with ranged("forward", path or "root"):
                run = entering(path, inside, self._params, forward) if self._lazy else forward
                return run(*args, **kwargs)

        return enter_and_run


def _version(tensor: Tensor) -> int | None:
    """How often it has been written to; tensors of inference mode don't count."""
    return None if tensor.is_inference() else version_of(tensor)


def _may_differ(copied: Tensor, old: Tensor) -> bool:
    """Whether a copy whose version is as it was may have changed; see Note [changed buffers]."""
    if not copied.is_floating_point() and not copied.is_inference():
        return False
    comparable = type(copied) is Tensor and copied.device.type == "cpu" and not transforms_active()
    return not comparable or not torch.equal(copied, old)
