"""Places for what a rank holds, other than memory beside its params: `shard(place={...})`.

A place makes tensors, brings them beside the params and takes them back. `File` is a file mapped
into memory: on a CPU a step works in it where it lies, so nothing is copied, and the operating
system writes to the disk what the memory has no room for. `Host` is the host's memory beside a GPU,
with copies that neither the host nor the GPU's other work waits for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .devices import DeviceStream
from .errors import StructureError
from .tree import pattern_of

__all__ = ["Arriving", "File", "Host", "Leaving", "Place"]


class Arriving(Protocol):
    """A tensor on its way to the params' device."""

    def wait(self) -> Tensor:
        """The tensor there, once the work that is queued from now on may read it."""
        ...


class Leaving(Protocol):
    """A tensor on its way to a place."""

    def wait(self) -> object:
        """Return once the tensor may be written to again."""
        ...


@runtime_checkable
class Place(Protocol):
    """Where tensors of a kind lie, on one rank; no communication.

    Nothing is rounded: what is brought is, to the bit, what has left. Every method may be called
    for tensors of any shape, dtype and number of dims.

    A place may say how many tensors, or buckets of a state, it brings `ahead` of the one that is
    needed; else one. One whose copies go on after `leave` has a method `settle()`, which returns
    once all that has left may be read here by the host.
    """

    def empty(self, like: Tensor) -> Tensor:
        """A new tensor here, of this shape and dtype, contiguous, in memory that nothing else lies
        in. It lives as long as somebody holds it.

        Raises: whatever says that there is no room.
        """
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies here. One that doesn't is moved, by `empty` and `leave`: it was
        copied, unpickled, or made by another step."""
        ...

    def bring(self, stored: Tensor) -> Arriving:
        """Start to bring a tensor that lies here beside the params: to memory of its own, or the
        tensor itself, where it can be worked on. `stored` is only read. What is still leaving for
        it comes first."""
        ...

    def leave(self, tensor: Tensor, into: Tensor) -> Leaving:
        """Start to copy a tensor beside the params to one that lies here, in no other form: copies
        of a state are made of that. `tensor` is only read, and kept by the caller until it has
        waited."""
        ...


# Of a kind, as `shard` is given it: one place for all, or by patterns of units' paths
PlaceRule = Place | Mapping[str, Place | None] | None


@dataclass(frozen=True)
class ByUnit:
    """The places of one kind, by patterns of units' paths: the innermost that names a unit or a
    tree around it counts. None, and units that no pattern names: memory beside the params."""

    rule: Mapping[str, Place | None]
    _found: dict[str, Place | None] = field(default_factory=dict, compare=False, repr=False)

    def of(self, path: str) -> Place | None:
        """The place of the unit of this path. What belongs to no unit is at the root, ""."""
        if path not in self._found:
            pattern = pattern_of(path, self.rule)
            self._found[path] = None if pattern is None else self.rule[pattern]
        return self._found[path]

    @property
    def is_one(self) -> bool:
        """Whether all units have one place."""
        return [*self.rule] == [""]

    @property
    def distinct(self) -> list[Place]:
        """Each place once."""
        by_id = {id(place): place for place in self.rule.values() if place is not None}
        return [*by_id.values()]


def moved(place: Place | None, tensor: Tensor) -> Tensor:
    """A tensor where it lies in a place that a step works in; None: where it is."""
    if place is None or place.holds(tensor):
        return tensor
    made = place.empty(tensor)
    place.leave(tensor, made).wait()
    return made


def settle(places: Iterable[Place]) -> None:
    """Return once the host may read all that has left for these places."""
    for place in places:
        wait = getattr(place, "settle", None)
        if wait is not None:
            wait()


def ahead_of(place: Place) -> int:
    """How many tensors, or buckets of a state, a place brings before they are needed."""
    return int(getattr(place, "ahead", 1))


def brings_copies(place: Place, device: torch.device) -> bool:
    """Whether what a place brings takes memory beside params on this device; of a user's own place
    nobody knows, and yes is assumed."""
    if isinstance(place, Host):
        return place.is_beside(device)
    return not isinstance(place, File)


class Here(NamedTuple):
    """A tensor that need not travel: it lies where it was asked for."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class File:
    """Files of a folder, mapped into memory, one per tensor. For CPUs: a step works in them.

    Each file is made by this process for one tensor, and has no name any more once it is mapped. So
    no two ranks or steps can share one, nothing is left behind by a process that was killed, and
    the folder is needed only while tensors are made. Its room is taken at once: a full disk is an
    error there, and not a crash later.

    Args:
        folder: on a disk with room for what is placed; it must exist. Ranks may give different
            ones.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import functorch_zero as fz
        >>> folder = tempfile.mkdtemp()
        >>> place = fz.places.File(folder)
        >>> x = place.empty(torch.ones(3))
        >>> place.leave(torch.arange(3.0), x).wait()
        tensor([0., 1., 2.])
        >>> place.bring(x).wait() is x and place.holds(x)
        True
    """

    folder: str | os.PathLike[str] = field(repr=False)  # which ranks may choose apart

    def empty(self, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            raise NotImplementedError(
                f"places.File was asked for a tensor like one on {like.device}, and a GPU can't "
                "work in a mapped file. Remedy: places of other kinds, on CPUs"
            )
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        try:
            flat = self._mapped(like)
        except (OSError, RuntimeError) as error:
            raise StructureError(
                f"places.File could not make a file: {error}",
                expected=f"a folder with room for {like.nbytes:,} bytes more",
                got=os.fspath(self.folder),
                remedy="a folder that exists, on a disk with room for all that is placed",
            ) from error
        # No view of the flat: a tensor's base is looked for where leaves lie in flats
        made = torch.empty(0, dtype=like.dtype, device="cpu")
        return made.set_(flat.untyped_storage()).resize_(like.shape)

    def _mapped(self, like: Tensor) -> Tensor:
        """(numel,), in a file that is made now, and has no name afterwards."""
        handle, name = tempfile.mkstemp(prefix=_prefix(), dir=self.folder)
        try:
            try:
                # Written to without room, a mapped file would end the process
                os.posix_fallocate(handle, 0, like.nbytes)
            finally:
                os.close(handle)
            return torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype)
        finally:
            os.unlink(name)

    def holds(self, tensor: Tensor) -> bool:
        if not tensor.numel():
            return tensor.device.type == "cpu"
        # Torch keeps the name of a mapped file; None: of other memory
        folder, file = os.path.split(tensor.untyped_storage().filename or "")
        if not file.startswith(_PREFIX) or folder != os.fspath(self.folder):
            return False
        if not file.startswith(_prefix()):
            raise StructureError(
                "a process was forked from one that trains in mapped files, and shares them "
                "with it: what one writes would change the other's",
                got=f"a file of the process {file.split('-')[1]} in the process {os.getpid()}",
                remedy="load a checkpoint in the new process, or give it step.unshard(state)",
            )
        return True

    def bring(self, stored: Tensor) -> Arriving:
        return Here(stored)

    def leave(self, tensor: Tensor, into: Tensor) -> Leaving:
        return Here(into.copy_(tensor))


class _Moving:
    """A copy under way between a GPU and the host's memory."""

    def __init__(self, stream: DeviceStream, *tensors: Tensor):
        self._stream, self._end = stream, stream.end()
        # Kept until the caller's stream waits, or somebody drops this
        self._tensors = tensors

    def wait(self) -> Tensor:
        """The first of the tensors, for work that the caller queues from now on."""
        self._stream.hold_caller(self._end)
        found, self._tensors = self._tensors[0], self._tensors[:1]
        return found


@dataclass(frozen=True)
class Host:
    """Pinned memory of the host, for a rank whose params are on a GPU.

    Copies run on a stream of their own. The GPU's other work waits for those that it needs, and the
    host for none, except where it reads: a checkpoint, and a read of `state.opt_state`. Of a state
    at most 1 + `ahead` buckets are on the GPU during its update.

    With params on a CPU it is plain memory: tensors are worked on where they lie, and nothing is
    copied. So a program runs on both.

    One place serves the GPU of the first tensor that it is given; ranks with several GPUs in one
    process have one each.

    Args:
        ahead: how many buckets of the state, or saved tensors, are brought before they are needed,
            at least 0.

    Raises:
        ValueError: `ahead` is something else.

    Example:
        >>> import torch
        >>> import functorch_zero as fz
        >>> place = fz.places.Host()
        >>> x = place.empty(torch.ones(3))
        >>> place.leave(torch.arange(3.0), x).wait()
        tensor([0., 1., 2.])
        >>> place.bring(x).wait() is x and place.holds(x)
        True
    """

    ahead: int = 1
    # Of the GPU that it serves, once it is known
    _streams: dict[torch.device, DeviceStream] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if type(self.ahead) is not int or self.ahead < 0:
            raise ValueError(
                f"places.Host: ahead must be a number of buckets, at least 0, got {self.ahead!r}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Host, (self.ahead,)  # a stream belongs to its process

    @property
    def _stream(self) -> DeviceStream | None:
        return next(iter([*self._streams.values()]), None)

    def is_beside(self, device: torch.device) -> bool:
        """Whether params on this device lie elsewhere than here. Those on meta are to be a GPU's:
        beside a CPU nobody needs a `Host`."""
        return self._stream is not None or device.type != "cpu"

    def empty(self, like: Tensor) -> Tensor:
        stream = self._stream
        if like.device.type != "cpu":
            # Threads may come at once: the first one's counts for all
            stream = self._streams.setdefault(like.device, DeviceStream(like.device))
            if len(self._streams) > 1:
                raise StructureError(
                    "one places.Host was given tensors of several GPUs",
                    expected=next(iter(self._streams)),
                    got=like.device,
                    remedy="a Host per rank: shard(..., place={'state': fz.places.Host()})",
                )
        if stream is not None:
            return stream.pinned(like)
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def holds(self, tensor: Tensor) -> bool:
        stream = self._stream
        if stream is None or not tensor.numel():
            return tensor.device.type == "cpu"
        # Memory that isn't pinned would make the host wait
        return stream.is_pinned(tensor)

    def bring(self, stored: Tensor) -> Arriving:
        stream = self._stream
        if stream is None:
            return Here(stored)
        return _Moving(stream, stream.copied(stored), stored)

    def leave(self, tensor: Tensor, into: Tensor) -> Leaving:
        stream = self._stream
        if stream is not None and stream.holds(tensor):
            stream.copy(tensor, into)
            return _Moving(stream, into, tensor)
        self.settle()  # else a copy of the stream's could come after this one of the host's
        return Here(into.copy_(tensor))

    def settle(self) -> None:
        """The host waits until all that has left lies here."""
        if self._stream is not None:
            self._stream.synchronize()


_PREFIX = "functorch_zero-"


def _prefix() -> str:
    """How the names of this process's files begin."""
    return f"{_PREFIX}{os.getpid()}-"
