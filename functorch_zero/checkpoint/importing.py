"""Weights from elsewhere, into pieces, without any rank holding the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import StructureError
from ..sharded.train import ShardedTrainStep
from ..step.state import TrainState
from ..step.train import TrainStep, optimizer_view
from .agreement import together
from .blank import blank_state
from .container import INTACT, read_header, strict_json
from .errors import CorruptError
from .exporting import INDEX, WEIGHTS, Aliases, aliases_of, name_in
from .folders import read_file
from .places import Held, Step, contents_of, group_of

MAX_INDEX = 2**26  # bytes
TREES = ("params", "buffers")


class Source(NamedTuple):
    """A tensor to read from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: Callable[[], Tensor]  # all of it; of a mapped file, what is looked at is read


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

    Each rank reads the elements it is to hold, and no others. The optimizer's state is made anew
    from them, since it may begin as a copy of the weights. The safetensors package maps the files:
    they must stay as they are meanwhile. No memory beyond the state. Two exchanges of JSON, and the
    optimizer's.

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
        CheckpointError: the safetensors package is not installed.
    """
    what = "import a state_dict" if isinstance(source, Mapping) else f"import {os.fspath(source)}"
    job = Import(what, lambda: _sources(source), step, like, aliases_of(aliases))
    return job.run(allow_missing, allow_extra, cast)


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


def _sources(source: Any) -> dict[str, Source]:
    tensors = source if isinstance(source, Mapping) else dict(_tensors_in(Path(source)))
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            got = f"{type(tensor).__name__} for {name}"
            raise StructureError(f"a state_dict holds tensors by name, got {got}")
        found[name] = Source(tuple(tensor.shape), tensor.dtype, tensor.detach)
    return found


def _tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file or folder by name, mapped."""
    for file, names in _files(path):
        found = map_file(file)
        for name in found if names is None else names:
            if name not in found:
                raise CorruptError(f"{file}: lacks {name}, which the index says is in it")
            yield name, found[name]


def map_file(file: Path) -> dict[str, Tensor]:
    """A safetensors file's tensors by name, mapped: reading one reads the file.

    Links are followed, since Hugging Face's cache is made of them.

    Raises:
        CorruptError: the file is missing, or no sound safetensors file.
        ImportError: the safetensors package is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        remedy = "Remedy: pip install safetensors"
        raise ImportError(f"weights in files take the safetensors package. {remedy}") from None
    file = file.resolve()
    strict_json(read_header(file), str(file))  # the package lets duplicate names pass
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        problem = f"not a sound safetensors file: {error}"
        raise CorruptError(f"{file}: {problem}. {INTACT}") from None


def _files(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files to read, and which tensors of each: None for all."""
    if not path.is_dir():
        return [(path, None)]
    if not (path / INDEX).exists():
        return [(path / WEIGHTS, None)]
    index = strict_json(read_file((path / INDEX).resolve(), MAX_INDEX), str(path / INDEX))
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
    """Put this rank's elements of a source into a leaf."""
    if held.start < held.stop:
        flat = source.whole().detach().reshape(-1)
        held.tensor.detach().view(-1).copy_(flat[held.start : held.stop])
