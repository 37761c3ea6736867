"""The initialisation of one module, of which only some leaves are wanted.

Note [the same values]: an initialiser finds a whole tensor in the place of every leaf, wanted or
not, and runs as it would on a module with values: random numbers, questions and values that it
reads are the same. So the values of a leaf don't depend on which others are made with it. A leaf
that is not wanted takes memory once an operator touches it, until the module is initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from .._torch_private import (
    QuickDispatchMode,
    arguments_of,
    make_wrapper,
    storage_id,
    without_torch_function,
)
from ..errors import StructureError
from .generators import is_seeded
from .lazy_param import METADATA


class UnwantedLeaf(Tensor):
    """A leaf or buffer as an initialiser sees it: made by the first operator that touches it."""

    make: Callable[[], Tensor]
    made: Tensor | None

    def whole(self) -> Tensor:
        if self.made is None:
            self.made = self.make()
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        args, kwargs = optree.tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = optree.tree_map(_whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def _whole(x: Any) -> Any:
    return x.whole() if type(x) is UnwantedLeaf else x


class Initialisation(QuickDispatchMode):
    """Inside, one module is initialised. See Note [the same values].

    Refuses the two things that would make values depend on what was made earlier: to read a leaf
    that only another module initialises, and to go on with a generator that has drawn before.

    Args:
        path: the module's, for errors.
        device: where leaves are made.
    """

    def __init__(self, path: str, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self._path = path
        self._device = device
        # Storages of unwanted leaves without values, by their numbers. Kept, since a leaf may be
        # given other `.data`, and torch uses a freed storage's number again
        self._unwritten: dict[int, torch.UntypedStorage] = {}
        self._generators: set[torch.Generator] = set()  # those that have drawn for this module

    def unwanted(self, meta: Tensor, make: Callable[[], Tensor]) -> UnwantedLeaf:
        """A leaf or buffer that is not wanted.

        Args:
            meta: the tensor without values in its place.
            make: makes the tensor to be initialised.
        """

        def make_and_note() -> Tensor:
            made = make()
            self._unwritten[storage_id(made)] = made.untyped_storage()
            return made

        # Not on the meta device for those who ask: torch's initialisers leave that out
        leaf: UnwantedLeaf = make_wrapper(
            *(UnwantedLeaf, meta.shape, meta.stride(), None, None, meta.dtype),
            *(torch.strided, self._device, False, meta.requires_grad),
        )
        leaf.make, leaf.made = make_and_note, None
        if isinstance(meta, torch.nn.Parameter):
            leaf._is_param = True  # by which torch's isinstance knows one
        return leaf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._unwritten:
            self._check_reads(func, args, kwargs)
        # torch tags operators that draw from a generator
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._check_generators(optree.tree_leaves((args, kwargs)))
        return func(*args, **kwargs)

    def _check_reads(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise if an operator reads an unwanted leaf before anybody has written to it."""
        name = func.overloadpacket.__name__
        makes_new = name.endswith("_like") or name.startswith("new_")  # asks for the shape alone
        for argument, x in _given(func, args, kwargs):
            inside = [y for y in optree.tree_leaves(x) if isinstance(y, Tensor)]
            for tensor in inside:
                if tensor.layout is not torch.strided or storage_id(tensor) not in self._unwritten:
                    continue
                # A view writes and reads nothing: those who use it do
                if argument.alias_info is not None:
                    if argument.alias_info.is_write:
                        del self._unwritten[storage_id(tensor)]
                elif not makes_new:
                    raise StructureError(
                        "a module's initialisation reads a leaf that it hasn't written to, and "
                        "that has no values now: leaves are made one bucket at a time",
                        path=self._path,
                        expected="values of leaves that the same initialisation has written",
                        got=f"{func} of a leaf of shape {tuple(tensor.shape)}",
                        remedy="initialise both leaves there; or make the one that is read, "
                        "with its value, off the meta device",
                    )

    def _check_generators(self, given: list[Any]) -> None:
        """Raise if a generator of the user's has drawn before this module's initialisation."""
        for x in given:
            if not isinstance(x, torch.Generator) or x in self._generators:
                continue
            self._generators.add(x)
            if is_seeded(x, self._device):
                continue  # for this module
            as_seeded = torch.Generator(x.device).manual_seed(x.initial_seed())
            if not torch.equal(x.get_state(), as_seeded.get_state()):
                raise StructureError(
                    "a module's initialisation goes on with a generator that has drawn before, "
                    "so that values would depend on the leaves that were made earlier",
                    path=self._path,
                    expected="a generator as it was seeded",
                    got="one that has drawn since",
                    remedy="seed it in the initialisation, generator.manual_seed(...); or draw "
                    "without a generator, which deferred_init seeds per module",
                )


def _given(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """An operator's arguments, each with the value given for it."""
    arguments = arguments_of(func)
    yield from zip(arguments, args, strict=False)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]
