"""The checkpoints of a folder: the list of them, the intact ones, the ones to keep."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import explain, warn
from .block_io import entry_of, read_through
from .errors import CheckpointError, CheckpointWarning, CorruptError
from .files import counts_in, opened_whole, read_file, remove_folder, step_folder
from .manifest import MAX_BYTES, NAME, Manifest, parse_manifest
from .places import SavedPiece, find_places, read_rows
from .rows import rows_name, rows_size
from .safetensors_file import make_header, read_header

PathLike = str | os.PathLike[str]


def chosen(root: PathLike, count: int | None) -> tuple[Manifest, Path]:
    """The manifest and the folder of one step, None being the newest complete one, its files' sizes
    checked."""
    if not isinstance(root, str | os.PathLike):
        raise TypeError(
            explain(
                "a checkpoint is read from a folder",
                expected="the root that it was saved to",
                got=f"a {type(root).__name__}",
                remedy="checkpoint.save(root, step, state), and pass that root",
            )
        )
    found = step_in(Path(root), count)
    return check_sizes(Path(root), found), step_folder(Path(root), found)


def step_in(root: Path, count: int | None) -> int:
    """The step of that number, None being the newest complete one.

    Raises:
        CheckpointError: it has no checkpoint.
    """
    found = latest(root) if count is None else count
    counts = counts_in(root)
    if found is not None and found in counts:
        return found
    which = "complete checkpoint" if count is None else f"checkpoint of step {count}"
    listed = ", ".join(map(str, counts[-10:])) or "none"
    if not root.exists():
        listed += ", and there is no such folder"
    raise CheckpointError(f"{root} has no {which}; steps found: {listed}")


def latest(root: PathLike) -> int | None:
    """The newest step whose checkpoint is complete: its manifest is sound and every file is there
    in its full size.

    The files' contents are checked when they are loaded, and by `verify`. None when there is no
    such checkpoint. Warns (`CheckpointWarning`) about newer ones that are damaged. Run by one rank
    or by all; no communication.
    """
    for count in reversed(counts_in(Path(root))):  # from the newest on
        try:
            check_sizes(Path(root), count)
        except CorruptError as error:
            warn(f"the checkpoint of step {count} is passed over: {error}", CheckpointWarning)
        else:
            return count
    return None


def read_manifest(root: Path, count: int) -> Manifest:
    """The manifest of the checkpoint of step `count`.

    Raises:
        CorruptError: it is damaged, or that of another step.
    """
    path = step_folder(root, count) / NAME
    # Bounded before it is read: a damaged file may be of any size
    manifest = parse_manifest(read_file(path, MAX_BYTES), str(path))
    if manifest.step != count:
        raise CorruptError(
            f"{path}: is the manifest of step {manifest.step}, in the folder of step {count}"
        )
    return manifest


def check_sizes(root: Path, count: int) -> Manifest:
    """The manifest, and every file's size compared with it.

    Raises:
        CorruptError: naming the file that is missing or of another size.
    """
    manifest = read_manifest(root, count)
    for name, expected in _sizes(manifest).items():
        path = step_folder(root, count) / name
        with opened_whole(path, expected):
            pass
    return manifest


def _sizes(manifest: Manifest) -> dict[str, int]:
    """The bytes of every file of a checkpoint but the manifest, by its name."""
    sizes = {}
    for file in manifest.files:
        sizes[file.name] = file.size
        if file.name not in manifest.old_rows:
            size = rows_size(file.num_pieces, manifest.num_blocks(file))
            sizes[rows_name(file.name)] = size
    return sizes


def verify(root: PathLike, *, count: int | None = None) -> dict[int, list[str]]:
    """Read checkpoints from end to end. For each step, its faults: none for an intact one.

    The manifest, the rows, the sizes and the checksums of every block are checked. Besides, every
    element must be there exactly once, each file's own header must say the same as its rows, and
    nothing else may lie in the folder. Run by one rank.

    Args:
        root: the folder of checkpoints.
        count: one step, or None for all.

    Raises:
        CheckpointError: there is no checkpoint of step `count`.
    """
    # `count=None` on an empty folder is no error: there is nothing to find fault with
    counts = counts_in(Path(root)) if count is None else [step_in(Path(root), count)]
    return {n: _problems(Path(root), n) for n in counts}


def _problems(root: Path, count: int) -> list[str]:
    """The faults of one step's checkpoint, in words."""
    folder = step_folder(root, count)
    try:
        manifest = read_manifest(root, count)
    except (CorruptError, OSError) as error:
        return [str(error)]  # without a manifest nothing else can be checked
    problems = []
    for number in range(len(manifest.files)):
        try:
            _verify_file(manifest, folder, number)
        except (CorruptError, OSError) as error:
            problems.append(str(error))
    if not problems:  # else the pieces aren't all known
        try:
            find_places(manifest, folder, manifest.everything)
        except CorruptError as error:
            problems.append(str(error))
    # Files that no load would open, and that nothing else would report
    extra = sorted(set(os.listdir(folder)) - {NAME, *_sizes(manifest)})
    for name in extra[:10]:
        problems.append(f"{folder / name}: does not belong to the checkpoint")
    return problems


def _verify_file(manifest: Manifest, folder: Path, number: int) -> None:
    """Raise `CorruptError` unless a rank's file has the checksums and the header that its rows
    say."""
    file = read_rows(manifest, folder, number)
    read_through(file)
    pieces = [SavedPiece(*row) for row in file.table.tolist()]
    # The header is made anew from the rows, and must be the file's to the byte
    tensors = []
    for piece in pieces:
        leaf = manifest.leaves[piece.leaf]
        tensors.append(entry_of(leaf.path, leaf.dtype, piece.start, piece.stop - piece.start))
    header, offsets = make_header(tensors)
    # Bytes from the beginning of the file, and the end
    promised = [*(piece.offset for piece in pieces), file.size]
    if read_header(file.path) != header[8:] or offsets != promised:  # without the header's length
        remedy = "Remedy: load another step (`count=`)"
        raise CorruptError(f"{file.path}: its header and its rows differ. {remedy}")


def prune(root: PathLike, *, last: int, every: int | None = None) -> list[int]:
    """Delete old checkpoints, and return the steps deleted. Run by one rank, at any time.

    A checkpoint vanishes at once, however long deleting takes. Damaged ones are neither counted nor
    deleted, and one that is being saved isn't there yet. With each one without frozen params that
    is kept stays the newest one before it that has them.

    Args:
        root: the folder of checkpoints.
        last: the number of the newest to keep, at least 1.
        every: keep those of all multiples of this number of steps, too.
    """
    if last < 1 or (every is not None and every < 1):
        raise ValueError(f"last and every must be at least 1, got {last} and {every}")
    path = Path(root)
    # Oldest first; damaged ones must not push intact ones out
    intact = [manifest for count in counts_in(path) if (manifest := _complete(path, count))]
    old = [m.step for m in intact[:-last] if every is None or m.step % every]
    whole = [m.step for m in intact if not m.left_out]
    partial = [m.step for m in intact if m.left_out and m.step not in old]
    # Their frozen params may lie nowhere else, and those of later ones may be others
    needed = {max((n for n in whole if n < count), default=None) for count in partial}
    old = [count for count in old if count not in needed]
    for count in old:
        remove_folder(step_folder(path, count))
    return old


def _complete(root: Path, count: int) -> Manifest | None:
    """The manifest of step `count`, if it is sound, and all its files are there in full size."""
    try:
        return check_sizes(root, count)
    except CorruptError:
        return None
