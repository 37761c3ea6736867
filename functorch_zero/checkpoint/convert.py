"""Weights from and to other people's files: whole leaves under the model's own names, in
safetensors. An import goes straight into pieces: no rank holds the whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import StructureError
from ..model.functionalize import Apply
from ..optim.base import Transform
from ..params import Names
from ..step.state import State, marked
from ..tree import in_words
from .agreement import nothing, together
from .block_io import Target, read_leaves
from .catalogue import chosen
from .contents import (
    Contents,
    LocalLeaf,
    Step,
    contents_of,
    frozen_in,
    group_of,
    names_in,
    optimizer_of,
)
from .errors import CheckpointError, CorruptError
from .files import created, folder_named, read_file, write_all, write_file
from .load import Allowed, Chosen, misfits, not_chosen, some_of, state_to_fill
from .manifest import Leaf, Manifest
from .places import Places, find_places
from .safetensors_file import (
    INTACT,
    LACKING,
    Entry,
    bytes_of,
    make_header,
    read_header,
    strict_json,
)
from .save import wait_for_saves

PathLike = str | os.PathLike[str]
Aliases = Mapping[str, str] | Apply | None
Rename = Mapping[str, str | None] | Callable[[str], str | None] | None

TREES = ("params", "buffers")  # paths in the state
MAX_INDEX = 2**26  # bytes
# Names that Hugging Face's loaders look for
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FEW = 2**20  # elements that are compared together: their copies take memory


def export_weights(
    root: PathLike,
    out: PathLike,
    *,
    count: int | None = None,
    trees: Sequence[str] = TREES,
    frozen: bool = True,
    aliases: Aliases = None,
    max_file_bytes: int = 5 * 10**9,
) -> Path:
    """Write a model's leaves, whole, as Hugging Face's loaders read them, and return the folder
    `out`.

    That is `model.safetensors`, or, with more than `max_file_bytes`,
    `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. `Module.load_state_dict`
    takes what `safetensors.torch.load_file` reads. Run by one process, without a group. Every block
    read is checked. Memory: the largest leaf, and 4 MiB.

    Args:
        root: the folder of checkpoints.
        out: a new folder; it gets its name when everything is on disk.
        count: the step; None: the newest complete one.
        trees: paths in the state. A leaf's name is the rest of its path after one of them, so
            `("opt_state.1.ema", "buffers")` exports averages under the model's names.
        frozen: False: without the params that the training step did not train.
        aliases: names under which to write a leaf once more: for tied weights, which a state holds
            once and `load_state_dict` asks for twice. A dict from name to leaf, or the `apply` that
            `functionalize` made, which also says which buffers are not persistent: these are left
            out, as `Module.state_dict` leaves them out. None: as the params knew it that were
            saved, those of `functionalize` do.
        max_file_bytes: of tensors in one file; a larger leaf has a file for itself.

    Raises:
        CheckpointError: there is no such checkpoint, `out` exists, no leaf lies under `trees`, one
            is of a dtype that safetensors lacks, or the checkpoint was saved without frozen params.
        CorruptError: the checkpoint is damaged; the file is named.
        TypeError: `root` is no path: a `State`, say.
    """
    manifest, folder = chosen(root, count)
    leaves = leaves_by_name(manifest, trees, names_of(aliases), frozen=frozen)
    for leaf in leaves.values():
        if leaf.dtype in LACKING:
            raise CheckpointError(f"safetensors files can't hold {leaf.path}: {leaf.dtype}")
    places = places_of(leaves.values(), manifest, folder)
    files = _split(leaves, max_file_bytes)
    with folder_named(out) as made:
        names = _file_names(len(files))
        for name, own in zip(names, files, strict=True):
            _write(made / name, own, places)
        if len(files) > 1:
            write_file(made / INDEX, _index(names, files), MAX_INDEX)
    return Path(out)


def names_of(given: Aliases) -> Names | None:
    """The names that the caller gives; None: those that the trees themselves know."""
    if isinstance(given, Apply):
        return given.names
    return None if given is None else Names(dict(given))


def name_in(path: str, trees: Sequence[str]) -> str | None:
    """A leaf's name: the rest of its path after one of `trees`; None when it lies in none."""
    for tree in trees:
        if path == tree:
            return tree.rpartition(".")[2]
        if path.startswith(f"{tree}."):
            return path[len(tree) + 1 :]
    return None


def leaves_by_name(
    manifest: Manifest, trees: Sequence[str], names: Names | None, *, frozen: bool = True
) -> dict[str, Leaf]:
    """The leaves under `trees` by the names that files have for them, aliases included.

    `names`: None: those that the trees had when they were saved. `frozen`: as of `export_weights`.
    """
    lacking = [leaf.path for leaf, _ in manifest.left_out if name_in(leaf.path, trees) is not None]
    if frozen and lacking:
        raise CheckpointError(
            f"the checkpoint was saved without the frozen {some_of(lacking)}. Remedy: load it over "
            "them and save the whole, or export_weights(..., frozen=False)"
        )
    if not frozen and manifest.frozen is None:
        raise CheckpointError(
            "the checkpoint doesn't say which leaves are frozen, being a program's or of an "
            "earlier version. Remedy: of a training step, load it and save it anew"
        )
    unwanted = frozenset() if frozen else manifest.frozen or frozenset()
    saved = [leaf for leaf in manifest.leaves if leaf.path not in unwanted]
    found = by_name(saved, trees, CheckpointError)
    if not found:
        raise CheckpointError(f"the checkpoint has no leaf under {', '.join(trees)}")

    if names is None:
        names = _saved_names(manifest, trees, found)
    # Aliases come last: the same elements written once more
    again = {}
    unwanted_names = {name_in(path, trees) for path in unwanted}
    for name, target in names.aliases.items():
        if target in unwanted_names:
            continue
        if name in found:
            raise CheckpointError(f"the alias {name} is a leaf itself")
        if target not in found:
            raise CheckpointError(f"the alias {name} stands for {target}, which is no leaf")
        again[name] = found[target]
    return {name: leaf for name, leaf in found.items() if name not in names.unsaved} | again


L = TypeVar("L", Leaf, LocalLeaf)


def by_name(leaves: Iterable[L], trees: Sequence[str], error: type[Exception]) -> dict[str, L]:
    """The leaves under `trees` by the model's names for them. Raises `error` if two have one."""
    named: dict[str, L] = {}
    for leaf in leaves:
        name = name_in(leaf.path, trees)
        if name is None:
            continue
        if name in named:
            raise error(f"two leaves have the name {name}: {named[name].path} and {leaf.path}")
        named[name] = leaf
    return named


def _saved_names(manifest: Manifest, trees: Sequence[str], leaves: Container[str]) -> Names:
    """The names that the trees had when they were saved, of these leaves."""
    aliases: dict[str, str] = {}
    unsaved: set[str] = set()
    for tree in trees:
        known = manifest.names.get(tree, Names())
        aliases |= {name: leaf for name, leaf in known.aliases.items() if leaf in leaves}
        unsaved |= known.unsaved
    return Names(aliases, frozenset(unsaved))


def _split(leaves: Mapping[str, Leaf], limit: int) -> list[dict[str, Leaf]]:
    """Leaves in files of at most `limit` bytes, in order."""
    files: list[dict[str, Leaf]] = [{}]
    size = 0
    for name, leaf in leaves.items():
        # A leaf larger than the limit is alone in its file: an empty file is never closed
        if files[-1] and size + leaf.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = leaf
        size += leaf.nbytes
    return files


def _file_names(num_files: int) -> list[str]:
    """The names that Hugging Face's tools give to so many files."""
    if num_files == 1:
        return [WEIGHTS]
    return [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]


def _index(names: Sequence[str], files: Sequence[Mapping[str, Leaf]]) -> bytes:
    """The file that says in which file each tensor is."""
    total = sum(leaf.nbytes for leaves in files for leaf in leaves.values())
    file_of = {name: file for file, own in zip(names, files, strict=True) for name in own}
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    return json.dumps(index, indent=2).encode()


def _write(path: Path, leaves: Mapping[str, Leaf], places: Places) -> None:
    """Write one safetensors file of these leaves, read from their places."""
    # So that each is aligned
    ordered = sorted(leaves.items(), key=lambda named: -named[1].width)
    entries = [Entry(name, leaf.dtype, leaf.shape) for name, leaf in ordered]
    # Loaders of Hugging Face refuse a file without this format
    header, _ = make_header(entries, {"format": "pt"})
    with created(path) as descriptor:
        write_all(descriptor, memoryview(header))
        for _, leaf in ordered:
            if leaf.numel:  # the leaf is freed before the next one is read
                write_all(descriptor, bytes_of(read_leaf(leaf, places)))


def places_of(leaves: Iterable[Leaf], manifest: Manifest, folder: Path) -> Places:
    """Where the leaves lie in the checkpoint in `folder`."""
    wanted = {manifest.numbers[leaf.path]: (0, leaf.numel) for leaf in leaves}
    return find_places(manifest, folder, wanted)


def read_leaf(leaf: Leaf, places: Places) -> Tensor:
    """One leaf, whole, on the CPU."""
    whole = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    read_leaves(places, {places.manifest.numbers[leaf.path]: [Target(whole.view(-1), 0)]})
    return whole


class Source(NamedTuple):
    """A tensor to read from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Not a tensor: a source is read when it is its turn, and freed after
    whole: Callable[[], Tensor]  # all of it; of a mapped file, only pages in use are read


# What lies under a name: a tensor, or the type of something else, a module's extra state say
Found = Source | str


def import_weights(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    step: Step,
    *,
    like: State,
    aliases: Aliases = None,
    rename: Rename = None,
    frozen: bool = True,
    allow_missing: Chosen = False,
    allow_extra: Chosen = False,
    cast: bool = False,
) -> State:
    """A first state with weights from safetensors files or a `state_dict`. Every rank of the step's
    group calls this.

    Each rank reads the elements it is to hold, and no others. The optimizer's state is made anew
    from them, since it may begin as a copy of the weights. The safetensors package maps the files:
    they must stay as they are meanwhile. No memory beyond the state. Two exchanges of JSON, and the
    collectives of the optimizer's init.

    Args:
        source: a `.safetensors` file, a folder with `model.safetensors` or
            `model.safetensors.index.json`, or tensors by name, as `Module.state_dict` gives them.
        step: the step function that the state is for.
        like: a state of `step`, from `step.init`. If `step` donates, it can't be used again.
        aliases: names that stand for a leaf of another name (tied weights). Such a tensor is read
            where the source lacks the leaf's own name, and else must have the same values. A dict
            from name to leaf, or the `apply` that `functionalize` made. With that, buffers which
            are not persistent may be missing, since no `state_dict` has them. None: as `like`'s
            params know it, those of `functionalize` do.
        rename: the model's names for those of the source: a dict, in which other names stay as they
            are, or a function. None in place of a name leaves the entry out.
        frozen: False: the source may lack the params that the step does not train, which keep
            `like`'s values, as `export_weights(..., frozen=False)` writes it.
        allow_missing: leaves that the source lacks keep `like`'s values: all, or those of one or
            several patterns of paths ("**.adapter.*"; `*` is one name, `**` any number).
        allow_extra: entries that `like` lacks are left out, chosen in the same way: tensors, and
            entries that are no tensors, such as the extra states of modules ("**._extra_state").
        cast: convert dtypes.

    Raises:
        StructureError: on every rank: names, shapes or dtypes are not `like`'s, or two names of a
            tied leaf have different values; they are named.
        CorruptError: a file is damaged, or no safetensors file; it is named.
        CheckpointError: the safetensors package is not installed; or the `async_save` under way
            with this step, which ends first, failed.
    """
    name = "a state_dict" if isinstance(source, Mapping) else os.fspath(source)
    return import_into(
        f"import {name}",
        lambda: _sources(source),
        step,
        like,
        names_of(aliases),
        rename,
        Allowed(missing=allow_missing, extra=allow_extra, cast=cast),
        frozen=frozen,
    )


@torch.no_grad()
def import_into(
    what: str,
    find: Callable[[], dict[str, Found]],
    step: Step,
    like: State,
    names: Names | None,
    rename: Rename,
    allowed: Allowed,
    *,
    frozen: bool = True,
) -> State:
    """Find, compare and read: each on all ranks or on none.

    Args:
        what: the work, for errors: "import weights.safetensors".
        find: finds the tensors by name.
        step: the step function that the state is for.
        like: a state of it.
        names: of the model, in files; None: those that `like` knows.
        rename: the model's names for those that are found.
        allowed: differences between those that are found and `like`.
        frozen: whether frozen params must be found.
    """
    optimizer = optimizer_of(step) if isinstance(step, Step) else None
    if optimizer is None:
        raise TypeError(
            f"weights are imported into the state of a training step, got a {type(step).__name__}. "
            "Remedy: of a program, load them into the params that step.init is given"
        )
    group = group_of(step)

    def prepare() -> tuple[Contents, dict[str, Source]]:
        # As in `load`: it may still read what is written over here
        wait_for_saves(step)
        found, old = _renamed(find(), rename), contents_of(step, like)
        own = names_in(like).get("params", Names()) if names is None else names
        optional = set(own.unsaved)
        if not frozen:
            optional |= {str(name_in(path, TREES)) for path in frozen_in(step, like)}
        leaves = by_name(old.leaves, TREES, StructureError)
        return old, _matching(leaves, found, own.aliases, optional, allowed)

    def read() -> State:
        """From here on, a step that donates has used `like` up."""
        old, sources = prepared.own
        made_anew = {x.path for x in old.leaves if name_in(x.path, ["opt_state"]) is not None}
        state, new = state_to_fill(step, like, old, made_anew | sources.keys())
        for local in new:
            if local.path in sources:
                _fill(local, sources[local.path])
        return state

    # Nothing is written to before every rank has found all in order
    prepared = together(group, what, prepare, nothing)
    state = together(group, what, read, nothing).own
    # Made from the new params, on all ranks: `init` may communicate
    return first_optimizer_state(optimizer, state.replace(opt_state=None))


def _matching(
    leaves: Mapping[str, LocalLeaf],
    found: Mapping[str, Found],
    aliases: Mapping[str, str],
    optional: AbstractSet[str],
    allowed: Allowed,
) -> dict[str, Source]:
    """The source of each leaf that has one, by the leaf's path.

    Args:
        leaves: by the model's names.
        found: by the model's names.
        aliases: further names of leaves.
        optional: names of leaves that may be missing.

    Raises:
        StructureError: the two don't fit each other as far as is asked; names are named.
    """
    aliases = {name: leaf for name, leaf in aliases.items() if leaf in leaves}
    # Patterns name what is left out unread; True doesn't say that a name is to lose
    patterns = False if allowed.extra is True else allowed.extra
    # By leaf, its names among those found: others may write a tied leaf under any of its names
    names = {leaf: [leaf] for leaf in leaves if leaf in found}
    for name, leaf in aliases.items():
        # One that is a leaf, too, has values of its own: it is read where no other name is found
        if name in found and not (leaf in names and name in leaves):
            names.setdefault(leaf, []).append(name)
    lacking = not_chosen(leaves.keys() - names.keys() - optional, allowed.missing)
    extra = not_chosen(found.keys() - leaves.keys() - aliases.keys(), allowed.extra)
    problems = []
    if lacking:
        problems.append(
            f"it lacks {some_of(lacking)} (aliases=apply knows buffers "
            "that no state_dict has; frozen=False keeps `like`'s params that aren't trained, "
            "and allow_missing=True, or patterns, any)"
        )
    if extra:
        problems.append(
            f"it has {some_of(_told(name, found[name]) for name in extra)}, which `like` lacks "
            "(aliases=apply knows other names of tied leaves, and rename= gives the model's "
            "names; allow_extra=True, or patterns, leaves them out)"
        )
    sources: dict[str, Source] = {}
    unequal = []
    for leaf, (first, *others) in sorted(names.items()):
        local = leaves[leaf]
        for name in (first, *not_chosen(others, patterns)):
            given = found[name]
            if isinstance(given, str):
                problems.append(f"{_told(name, given)} has the name of a leaf")
                continue
            problems += misfits(name, local, given.shape, given.dtype, allowed)
            source = sources.setdefault(local.path, given)
            if not (problems or _are_equal(local, source, given)):
                unequal.append(
                    f"{first} and {name} are names of one leaf here, and have different values. "
                    f'Remedy: rename={{"{name}": None}} lets {first} count, or '
                    f'allow_extra="{name}"'
                )
    problems += unequal
    if problems:
        raise StructureError("the weights are those of another model: " + "; ".join(problems[:5]))
    return sources


def _renamed(found: Mapping[str, Found], rename: Rename) -> dict[str, Found]:
    """All that was found, by the model's names.

    Raises:
        StructureError: two would have one name, or a name to be replaced is not there.
    """
    names = {old: rename(old) for old in found} if callable(rename) else dict(rename or {})
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise StructureError(f"rename= has {unknown[0]}, which is not among the weights")
    named: dict[str, Found] = {}
    for old, source in found.items():
        name = names.get(old, old)
        if name is None:
            continue
        if name in named:
            raise StructureError(f"rename= gives two tensors the name {name}; {old} is the second")
        named[name] = source
    return named


def _told(name: str, given: Found) -> str:
    return f"{name} (no tensor, a {given})" if isinstance(given, str) else name


def first_optimizer_state(optimizer: Transform, state: State) -> State:
    """The state with the optimizer's state as `init` makes it of these params. The collectives that
    `init` needs."""
    params = state.params
    # Trained as the state says, whatever its leaves say
    params = marked(state) if state.sharding is None else params.held_as(params.holding)
    return state.replace(opt_state=optimizer.init(params))


def _sources(source: Any) -> dict[str, Found]:
    """The entries of files or of a `state_dict`, by name."""
    entries = source if isinstance(source, Mapping) else dict(_tensors_in(Path(source)))
    found: dict[str, Found] = {}
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise StructureError(f"a state_dict holds tensors by name, got the key {name!r}")
        found[name] = type(entry).__name__
        if isinstance(entry, Tensor):
            # `detach` is the function that gives the whole tensor
            found[name] = Source(tuple(entry.shape), entry.dtype, entry.detach)
    return found


def _tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file or folder by name, mapped."""
    if not (path / INDEX).exists():
        yield from map_file(path / WEIGHTS if path.is_dir() else path).items()
        return
    where = _index_of(path)
    mapped = {file: map_file(path / file) for file in dict.fromkeys(where.values())}
    for name, file in where.items():
        if name not in mapped[file]:
            raise CorruptError(f"{path / file}: lacks {name}, which the index says is in it")
        yield name, mapped[file][name]


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
        # It maps the file, so tensors are read when their pages are used
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        problem = f"not a sound safetensors file: {error}"
        raise CorruptError(f"{file}: {problem}. {INTACT}") from None


def _index_of(path: Path) -> dict[str, str]:
    """The name of the file beside it in which each tensor is."""
    index = strict_json(read_file((path / INDEX).resolve(), MAX_INDEX), str(path / INDEX))
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CorruptError(f"{path / INDEX}: has no weight_map from names to files")
    for file in where.values():
        # A name with a folder in it could reach any file of the machine
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise CorruptError(f"{path / INDEX}: {file[:80]!r} is not the name of a file beside it")
    return where


def _fill(local: LocalLeaf, source: Source) -> None:
    """Put this rank's elements of a source into a leaf."""
    # A rank without elements of the leaf reads nothing
    if local.start < local.stop:
        local.tensor.detach().view(-1).copy_(_elements(local, source))


def _elements(local: LocalLeaf, source: Source) -> Tensor:
    """This rank's elements of a source (numel,); of a mapped file, pages outside of the run stay
    unread."""
    return source.whole().detach().reshape(-1)[local.start : local.stop]


def _are_equal(local: LocalLeaf, *sources: Source) -> bool:
    """Whether two sources of a leaf have the same values on this rank, to the bit."""
    # Of no elements here other ranks have them, and are asked, too
    if sources[0] is sources[1] or local.start == local.stop:
        return True
    runs = [_elements(local, source).split(_FEW) for source in sources]
    for one, other in zip(*runs, strict=True):
        a, b = (in_words(x.to("cpu", local.tensor.dtype), torch.uint8) for x in (one, other))
        if not torch.equal(a, b):
            return False
    return True
