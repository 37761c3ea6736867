"""Folders of checkpoints: their names, and making one appear all at once.

    root/step-000000000120/                 there only when it is complete
    root/.tmp-step-000000000120-1f0c.../    being written, being deleted, or left by a process that
    was killed

A folder is written under its temporary name, flushed to disk, and renamed. Who writes to a root
holds a lock on it. So a temporary folder that the next one finds there is nobody's, and is deleted.
An export may lie in anybody's folder, and locks its own temporary folder alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointError, CorruptError

_STEP = re.compile(r"step-(\d{12,19})")  # an int64 has 19 digits at most


def step_folder(root: Path, count: int) -> Path:
    """The folder of a step's checkpoint, there or not."""
    return root / f"step-{count:012d}"


def counts_in(root: Path) -> list[int]:
    """The steps that have a checkpoint, intact or not, in order. Other names are not looked at."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    counts = []
    for name in names:
        match = _STEP.fullmatch(name)
        # Longer numbers than 12 digits must not begin with a zero: one step has one name
        if match and step_folder(root, int(match[1])).name == name:
            counts.append(int(match[1]))
    return sorted(counts)


def _temporary_name(target: Path) -> Path:
    return target.parent / f".tmp-{target.name}-{secrets.token_hex(8)}"


def _temporary_folders(folder: Path, targets: str) -> list[Path]:
    """The folders in `folder` under temporary names of targets with such names, a pattern."""
    pattern = re.compile(rf"\.tmp-{targets}-[0-9a-f]{{16}}")
    return [folder / name for name in os.listdir(folder) if pattern.fullmatch(name)]


class Temporary:
    """A folder under its temporary name.

    Args:
        target: its name to come.
        lock: lock the folder it is in until `commit` or `discard`, and delete all leftovers there.
            Else it locks itself only, and deletes leftovers of its own target.
    """

    def __init__(self, target: Path, *, lock: bool = True) -> None:
        self._root = target.parent
        self._target = target
        self._root.mkdir(parents=True, exist_ok=True)
        # Locked before looking: what is checked below can't change until the unlock
        self._lock = _lock(self._root) if lock else None
        self._gone = False  # it has its name, or was deleted
        try:
            if target.exists():
                raise _exists(target)
            if lock:
                # With the lock held, no temporary folder can be somebody's at work
                remove_leftovers(self._root)
                self.path = _new_folder(target)
            else:
                _remove_unlocked(_temporary_folders(self._root, re.escape(target.name)))
                self.path, self._lock = _new_locked_folder(target)
        except BaseException:
            self._unlock()
            raise

    def commit(self) -> None:
        """Make it appear under its name. Its files must be on disk already."""
        # The files' names reach the disk before the folder's new name does
        sync_folder(self.path)
        # Never onto another checkpoint: a folder that isn't empty can't be replaced
        try:
            os.rename(self.path, self._target)
        except OSError as error:
            # Another export to the same place was faster
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _exists(self._target) from None
            raise
        self._gone = True
        sync_folder(self._root)  # the new name, too, survives a power cut
        self._unlock()

    def discard(self) -> None:
        """Delete it, if it is there still. A disk that refuses even that leaves it for the next one
        to delete."""
        if not self._gone:
            self._gone = True
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                # A forked process may have the same one open
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def folder_named(out: str | os.PathLike[str]) -> Iterator[Path]:
    """The folder to write to, which gets the name `out` when the block has ended well."""
    # It may lie in anybody's folder, which is not ours to lock
    temporary = Temporary(Path(out).absolute(), lock=False)
    try:
        yield temporary.path
        temporary.commit()
    finally:
        temporary.discard()  # nothing is left to discard after a commit


def _exists(target: Path) -> CheckpointError:
    return CheckpointError(
        f"{target} exists, and is never overwritten. Remedy: delete or rename it first"
    )


def _new_folder(target: Path) -> Path:
    """A new folder under a temporary name of the target."""
    path = _temporary_name(target)
    os.mkdir(path)  # fails where the name exists, which 64 random bits rule out
    return path


def _new_locked_folder(target: Path) -> tuple[Path, int]:
    """A new folder under a temporary name of the target, and its lock.

    Until the lock is held, another export to the target may take the folder for a leftover. Then
    this makes another one, under another name.
    """
    while True:
        path = _new_folder(target)
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            descriptor = _lock(path)
            # Locked, but perhaps only after it was deleted
            if path.exists():
                return path, descriptor
            os.close(descriptor)


def _lock(folder: Path) -> int:
    """Lock a folder against other writers; the lock goes with the process. File systems without
    locks go without."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Held by another; any other error counts as a file system without locks
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise CheckpointError(
                f"another process is writing to {folder}, or deleting from it"
            ) from None
    return descriptor


def remove_leftovers(root: Path) -> None:
    """Delete the temporary folders of killed processes. The root must be locked."""
    for leftover in _temporary_folders(root, _STEP.pattern):
        shutil.rmtree(leftover, ignore_errors=True)


def _remove_unlocked(folders: list[Path]) -> None:
    """Delete those of some temporary folders that nobody has locked."""
    for folder in folders:
        # An OSError: somebody is at work in it, or has deleted it; or this file system has no locks
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def remove_folder(target: Path) -> None:
    """Delete a checkpoint so that no half of it is ever seen. Others may be doing so, too."""
    trash = _temporary_name(target)
    try:
        # At once: from here on no reader finds it, however long deleting takes
        os.rename(target, trash)
    except FileNotFoundError:
        return
    sync_folder(target.parent)
    shutil.rmtree(trash, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Flush a folder's names to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, limit: int) -> None:
    """Write a new file, and flush it to disk.

    Raises:
        CheckpointError: it is larger than `limit`, beyond which `read_file` wouldn't read it.
    """
    if len(data) > limit:
        raise CheckpointError(f"{path}: {len(data)} bytes, more than the {limit} that it may have")
    with created(path) as descriptor:
        write_all(descriptor, memoryview(data))


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """A descriptor of a new file, which is on disk when the block has ended well."""
    # Never onto an existing file, nor through a link
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:  # a file that an error cut short stays, and goes with its folder
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of it: one call may write less than it is given."""
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor for reading, and the file's size. Only a regular file will do: no link, pipe or
    device.

    Raises:
        CorruptError: it is none of these, or isn't there.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise CorruptError(f"{path}: {error.strerror}") from None
        raise
    try:
        # Asked of the descriptor, since the path may be another file by now
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptError(f"{path}: not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_whole(path: Path, expected: int) -> Iterator[int]:
    """A descriptor of a file of the size that it must have: one that is cut off is named as such
    before anything is read.

    Raises:
        CorruptError: it has another size; or as `opened`.
    """
    with opened(path) as (descriptor, size):
        if size != expected:
            raise CorruptError(f"{path}: {size} bytes, and it must have {expected}")
        yield descriptor


def read_file(path: Path, limit: int) -> bytes:
    """All of a small file.

    Raises:
        CorruptError: it is larger than `limit`, or no regular file.
    """
    with opened(path) as (descriptor, size):
        # Before the memory is taken
        if size > limit:
            raise CorruptError(f"{path}: {size} bytes, more than the {limit} that it may have")
        data = bytearray(size)
        read_into(descriptor, 0, path, memoryview(data))
        return bytes(data)


def read_into(descriptor: int, offset: int, path: Path, view: memoryview) -> None:
    """Fill a view from a place in a file.

    Raises:
        CorruptError: the file ends before.
    """
    while view:
        # preadv has no position of its own, so threads may share the descriptor
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise CorruptError(f"{path}: ends at byte {offset}, before it should")
        view = view[count:]
        offset += count
