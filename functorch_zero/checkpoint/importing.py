"""Weights from elsewhere, into pieces, without any rank holding the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import StructureError
from ..shard import ShardedTrainStep
from ..step import TrainState, TrainStep, optimizer_view
from .agreement import together
from .blank import blank_state
from .catalogue import header_of
from .container import DTYPES, Entry, bytes_of, strict_json
from .errors import CorruptError
from .exporting import INDEX, WEIGHTS, Aliases, aliases_of, name_in
from .folders import opened, read_file, read_into
from .places import Held, Step, contents_of, group_of

MAX_INDEX = 2**26  # bytes
_CHUNK = 2**22  # bytes read at once
TREES = ("params", "buffers")


class Source(NamedTuple):
    """A tensor to read from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: Callable[[], Tensor] | None  # gives all of it
    file: Path | None = None
    entry: Entry | None = None


def import_(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    step: Step,
    *,
    like: TrainState,
    aliases: Aliases = None,
    allow_missing: bool = False,
    allow_extra: bool = False,
    cast: bool = False,
) -> TrainState:
    """A first state with weights from safetensors files or a `state_dict`. Every rank of the step's group calls this.

    Each rank reads the elements it is to hold, and no others. The optimizer's state is made anew from them, since it
    may begin as a copy of the weights. Memory beyond the state: 4 MiB. Two exchanges of JSON, and the optimizer's.

    Args:
        source: a `.safetensors` file, a folder with `model.safetensors` or `model.safetensors.index.json`, or tensors
            by name, as `Module.state_dict` gives them.
        step: the step function that the state is for.
        like: a state of `step`, from `step.init`. If `step` donates, it can't be used again.
        aliases: names that stand for a leaf of another name (tied weights) and are left out: a dict from name to leaf,
            or the `apply` that `functionalize` made.
        allow_missing: leaves that the source lacks keep `like`'s values.
        allow_extra: tensors that `like` lacks are left out.
        cast: convert dtypes.

    Raises:
        StructureError: on every rank: names, shapes or dtypes are not `like`'s; they are named.
        CorruptError: a file is not what it should be; it is named.
    """
    what = "import a state_dict" if isinstance(source, Mapping) else f"import {os.fspath(source)}"
    return Import(what, lambda: dict(_sources(source)), step, like, aliases_of(aliases)).run(
        allow_missing, allow_extra, cast
    )


class Import:
    """One import, on one rank.

    Args:
        what: for errors, "import weights.safetensors".
        find: finds the tensors by name.
        step: the step function that the state is for.
        like: a state of it.
        aliases: names that stand for a leaf of another name.
    """

    def __init__(
        self, what: str, find: Callable[[], dict[str, Source]], step: Step, like: TrainState, aliases: dict[str, str]
    ):
        self._what, self._find, self._step, self._like, self._aliases = what, find, step, like, aliases
        self._sources: dict[str, Source] = {}
        self._state: TrainState | None = None

    @torch.no_grad()
    def run(self, missing: bool, extra: bool, cast: bool) -> TrainState:
        """Find, compare and read: each on all ranks or on none."""
        group = group_of(self._step)
        together(group, self._what, lambda: self._prepare(missing, extra, cast))
        together(group, self._what, self._read)
        assert self._state is not None
        return first_optimizer_state(self._step, self._state._replace(opt_state=None))

    def _prepare(self, missing: bool, extra: bool, cast: bool) -> None:
        found = self._find()
        named = _by_name(contents_of(self._step, self._like).held)
        problems = []
        lacking = sorted(set(named) - set(found))
        more = sorted(set(found) - set(named) - {a for a, leaf in self._aliases.items() if leaf in named})
        if lacking and not missing:
            problems.append(f"it lacks {', '.join(lacking[:5])} of {len(lacking)} (allow_missing=True keeps `like`'s)")
        if more and not extra:
            problems.append(
                f"it has {', '.join(more[:5])} of {len(more)} that `like` lacks (allow_extra=True; aliases=)"
            )
        for name in sorted(set(named) & set(found)):
            held, given = named[name], found[name]
            if held.shape != given.shape:
                problems.append(f"{name} has shape {given.shape}, expected {held.shape}")
            elif held.tensor.dtype != given.dtype and not cast:
                problems.append(f"{name} is {given.dtype}, expected {held.tensor.dtype} (cast=True converts)")
        if problems:
            raise StructureError("the weights are those of another model: " + "; ".join(problems[:5]))
        self._sources = {name: found[name] for name in named if name in found}

    def _read(self) -> None:
        reuse = isinstance(self._step, ShardedTrainStep) and self._step.options.donate
        old = _by_name(contents_of(self._step, self._like).held)
        self._state = state = blank_state(self._like, reuse=reuse)
        if reuse and self._like.sharding is not None:
            self._like.sharding.donations.take(self._like.step)
        state.step.copy_(self._like.step)
        if state.seed is not None and self._like.seed is not None:
            state.seed.copy_(self._like.seed)
        for name, held in _by_name(contents_of(self._step, state).held).items():
            if name in self._sources:
                _fill(held, self._sources[name])
            elif held.tensor is not old[name].tensor:
                held.tensor.copy_(old[name].tensor)


def first_optimizer_state(step: Step, state: TrainState) -> TrainState:
    """The state with the optimizer's state as `init` makes it of these params. The collectives that `init` needs."""
    if isinstance(step, TrainStep):
        return state._replace(opt_state=step.optimizer.init(*optimizer_view(state.params)))
    assert state.sharding is not None
    return state._replace(opt_state=step.first_optimizer_state(state.params, state.sharding.layout))


def _by_name(held: Sequence[Held]) -> dict[str, Held]:
    named: dict[str, Held] = {}
    for h in held:
        name = name_in(h.path, TREES)
        if name is not None:
            if name in named:
                raise StructureError(f"two leaves have the name {name}: {named[name].path} and {h.path}")
            named[name] = h
    return named


def _sources(source: Any) -> Iterator[tuple[str, Source]]:
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            if not isinstance(tensor, Tensor):
                raise StructureError(f"a state_dict holds tensors by name, got {type(tensor).__name__} for {name}")
            yield name, Source(tuple(tensor.shape), tensor.dtype, partial(_itself, tensor))
        return
    for file, names in _files(Path(source)):
        entries = header_of(file)
        for name in entries if names is None else names:
            if name not in entries:
                raise CorruptError(f"{file}: lacks {name}, which the index says is in it")
            entry = entries[name]
            yield name, Source(entry.shape, DTYPES[entry.dtype], None, file, entry)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _files(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files to read, and which tensors of each: None for all."""
    if not path.is_dir():
        return [(path, None)]
    if not (path / INDEX).exists():
        return [(path / WEIGHTS, None)]
    index = strict_json(read_file(path / INDEX, MAX_INDEX), str(path / INDEX))
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CorruptError(f"{path / INDEX}: has no weight_map from names to files")
    files: dict[str, list[str]] = {}
    for name, file in where.items():
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise CorruptError(f"{path / INDEX}: {file[:80]!r} is not the name of a file beside it")
        files.setdefault(file, []).append(name)
    return [(path / file, names) for file, names in files.items()]


def _fill(held: Held, source: Source) -> None:
    """Put elements [start, stop) of a source into a leaf."""
    if held.start == held.stop:
        return
    target = held.tensor.detach().view(-1)
    if source.whole is not None:
        target.copy_(source.whole().detach().reshape(-1)[held.start : held.stop])
        return
    assert source.file is not None and source.entry is not None
    width = source.dtype.itemsize
    room = torch.empty(max(1, _CHUNK // width), dtype=source.dtype)
    with opened(source.file) as (descriptor, _):
        for i in range(held.start, held.stop, room.numel()):
            part = room[: min(room.numel(), held.stop - i)]
            read_into(descriptor, source.entry.start + i * width, source.file, bytes_of(part))
            target[i - held.start : i - held.start + part.numel()].copy_(part)
