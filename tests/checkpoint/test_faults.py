"""Saves that are killed, disks that are full, files that are damaged: the old state or the new one,
or an error."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from functorch_zero import checkpoint
from functorch_zero.checkpoint import CheckpointError, CorruptError, agreement, files
from functorch_zero.checkpoint.files import Temporary
from functorch_zero.errors import GroupError, MismatchError, PeerError
from functorch_zero.groups import ProcessGroup, launch, run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.sharded import failures
from functorch_zero.sharded.api import shard
from functorch_zero.step.state import State
from tests.checkpoints import assert_same, leftovers, load_on, make_step, on_ranks, save_on, trained
from tests.tiers import thinned, tiers

CALLS = ("mkdir", "open", "write", "fsync", "rename")  # that change the disk
CLEANING = ("unlink", "rmdir")
RANKS = 2
NUM_CALLS = 20  # of a save into a root that is not there yet


class Interposed:
    """The calls to some functions of `os`, counted; at one of them, something happens instead."""

    def __init__(self, at: int, happens: Callable[[], None], names: tuple[str, ...]) -> None:
        self.calls: list[str] = []
        self._at, self._happens, self._names = at, happens, names

    @contextlib.contextmanager
    def installed(self) -> Iterator[Interposed]:
        originals = {name: getattr(os, name) for name in self._names}
        for name, original in originals.items():
            setattr(os, name, self._counting(name, original))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(os, name, original)

    def _counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
                return original(*args, **options)
            self.calls.append(name)
            if len(self.calls) == self._at:
                self._happens()
            return original(*args, **options)

        return call


def save_step(root: Path, steps: int) -> State:
    return save_on(root, RANKS, 3, steps=steps)


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, State, State, list[str]]:
    """A root with step 1, the states of steps 1 and 2, and the calls that saving step 2 makes."""
    root = tmp_path_factory.mktemp("saved")
    first = save_step(root / "one", 1)
    with Interposed(-1, lambda: None, CALLS).installed() as record:
        second = save_step(root / "two", 2)
    return root / "one", first, second, record.calls


def test_what_a_save_calls(saved: Any) -> None:
    """So that the tests below cover every one: two files with rows, the manifest, the folder, the
    root."""
    assert saved[3].count("open") == 2 * RANKS + 1 and saved[3].count("fsync") == 2 * RANKS + 3
    assert saved[3].count("write") == 2 * RANKS + 1 and saved[3].count("rename") == 1
    assert len(saved[3]) == NUM_CALLS


def in_child(fn: Callable[[], None]) -> int:
    """Run in a forked process; its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)
            fn()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("at", tiers([10], [at for at in range(1, NUM_CALLS + 2) if at != 10]))
def test_killed_at_every_call(saved: Any, tmp_path: Path, at: int) -> None:
    """C2. Both ranks, as threads, die before the call. What is left loads as step 1 or 2, and can
    be saved into."""
    old, first, second, calls = saved
    root = tmp_path / "root"
    shutil.copytree(old, root)

    def die() -> None:
        os._exit(9)

    def save() -> None:
        with Interposed(at, die, CALLS).installed():
            save_step(root, 2)

    assert in_child(save) == (9 if at <= len(calls) else 0)
    newest = checkpoint.latest(root)
    renamed = at > calls.index("rename") + 1
    assert newest == (2 if renamed else 1)
    assert_same(load_on(root, 1, 3), second if renamed else first)
    if not renamed:
        save_step(root, 2)
    save_step(root, 3)
    assert not leftovers(root) and checkpoint.verify(root) == {1: [], 2: [], 3: []}


@pytest.mark.parametrize("at", tiers([5], [1, 2, 3, 4, 6, 7, 8]))
def test_killed_while_cleaning_up(saved: Any, tmp_path: Path, at: int) -> None:
    """The save that finds leftovers, or `keep`, is killed in its turn."""
    root = tmp_path / "root"
    shutil.copytree(saved[0], root)
    garbage = root / ".tmp-step-000000000002-0123456789abcdef"
    shutil.copytree(root / "step-000000000001", garbage)

    def save() -> None:
        with Interposed(at, lambda: os._exit(9), CLEANING).installed():
            save_step(root, 2)
            checkpoint.prune(root, last=1)

    in_child(save)
    assert checkpoint.latest(root) in (1, 2)
    assert not any(checkpoint.verify(root).values())
    save_step(root, 3)
    assert not leftovers(root)


def test_only_our_own_leftovers_are_deleted(tmp_path: Path) -> None:
    for name in (
        ".tmp-mine",
        ".tmp-step-1-abc",
        "step-1",
        "notes",
        ".tmp-step-000000000002-0123456789abcdeg",
    ):
        (tmp_path / name).mkdir()
    save_step(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 6
    assert checkpoint.latest(tmp_path) == 1


@pytest.mark.parametrize("export", tiers([checkpoint.export_weights], [checkpoint.export_dcp]))
def test_the_leftover_of_a_killed_export_is_deleted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Callable[..., Path]
) -> None:
    save_step(tmp_path / "root", 1)

    def killed() -> None:
        monkeypatch.setattr(Temporary, "commit", lambda temporary: os._exit(9))
        export(tmp_path / "root", tmp_path / "out")

    assert in_child(killed) == 9 and len(leftovers(tmp_path)) == 1
    # Of another target; of one whose name begins alike; of nobody
    others = [".tmp-other-0123456789abcdef", ".tmp-out-2-0123456789abcdef", ".tmp-out-mine"]
    for name in others:
        (tmp_path / name).mkdir()
    # Of an export to the same place that is at work
    busy = Temporary(tmp_path / "out", lock=False)
    assert sorted(leftovers(tmp_path)) == sorted([*others, busy.path.name])
    export(tmp_path / "root", tmp_path / "out")
    busy.discard()
    assert sorted(leftovers(tmp_path)) == sorted(others)


@pytest.mark.parametrize("moment", ["before the lock is taken", "while the other one has it"])
def test_two_exports_to_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """One finds the folder of the other before that has locked it, and takes it for a leftover."""
    made: list[Path] = []
    held: list[int] = []

    def mkdir(path: Any, *args: Any) -> None:
        original(path, *args)
        if Path(path).name.startswith(".tmp-out-"):
            made.append(Path(path))
            if len(made) == 1 and moment == "before the lock is taken":
                files._remove_unlocked(made)
                assert not made[0].exists()
            elif len(made) == 1:
                held.append(files._lock(made[0]))

    original = os.mkdir
    save_step(tmp_path / "root", 1)
    monkeypatch.setattr(os, "mkdir", mkdir)
    out = checkpoint.export_weights(tmp_path / "root", tmp_path / "out")
    assert sorted(os.listdir(out)) == ["model.safetensors"] and len(made) == 2
    for descriptor in held:
        os.close(descriptor)
        assert leftovers(tmp_path) == [made[0].name]  # deleted by the one that has it


def test_the_slower_of_two_exports_overwrites_nothing(tmp_path: Path) -> None:
    slow = Temporary(tmp_path / "out", lock=False)
    fast = Temporary(tmp_path / "out", lock=False)
    for temporary in (fast, slow):
        (temporary.path / "weights").write_text(temporary.path.name)
    fast.commit()
    with pytest.raises(CheckpointError, match=r"out exists, and is never overwritten. Remedy"):
        slow.commit()
    slow.discard()
    assert (tmp_path / "out" / "weights").read_text() == fast.path.name
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(
    "at", thinned(range(2, NUM_CALLS + 1), 8)
)  # the first makes the root, which is there
def test_every_call_fails_once(saved: Any, tmp_path: Path, at: int) -> None:
    """C3. The disk is full: the same error on every rank, nothing left over, and saving works again
    afterwards."""
    old, first, second, calls = saved
    if at > len(calls):
        pytest.skip("a save has fewer calls")
    root = tmp_path / "root"
    shutil.copytree(old, root)
    base, params, buffers = make_step()

    def full() -> None:
        raise OSError(28, "No space left on device")

    def run(group: Group) -> str:
        step = shard(base, level=3, group=group)
        state = trained(step, params, buffers, 2)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(root, step, state)
        return str(caught.value)

    with Interposed(at, full, CALLS).installed():
        texts = run_ranks(run, RANKS)
    assert len(set(texts)) == 1 and "No space left on device" in texts[0] and "rank " in texts[0]
    assert not leftovers(root)
    assert_same(load_on(root, 1, 3, count=1), first)
    if at <= calls.index("rename") + 1:
        assert checkpoint.latest(root) == 1
        save_step(root, 2)
    assert_same(load_on(root, 1, 3), second)


def test_a_limit_on_the_size_of_files(saved: Any, tmp_path: Path) -> None:
    """C3, from the operating system."""
    root = tmp_path / "root"
    shutil.copytree(saved[0], root)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(
            CheckpointError, match=r"ranks 0, 1: OSError: \[Errno 27\] File too large"
        ):
            save_step(root, 2)

    assert in_child(limited) == 0
    assert checkpoint.latest(root) == 1 and not leftovers(root)


def test_a_step_is_never_overwritten(saved: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved[0], root)
    with pytest.raises(
        CheckpointError, match=r"rank 0: .*step-000000000001 exists, and is never overwritten"
    ):
        save_step(root, 1)
    assert_same(load_on(root, 1, 3), saved[1])
    assert not leftovers(root)


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0: (NotADirectory|FileExists)Error"):
        save_step(tmp_path / "file", 1)
    if os.geteuid():  # root may write anywhere
        (tmp_path / "sealed").mkdir(mode=0o555)
        with pytest.raises(CheckpointError, match="rank 0: PermissionError"):
            save_step(tmp_path / "sealed", 1)


def test_other_folders_after_a_failure(tmp_path: Path) -> None:
    """The first call after it is compared, by its verb: the error is of the folders."""

    def run(group: Group) -> None:
        step = shard(make_step()[0], level=3, group=group)
        state = step.init(*make_step()[1:])
        with pytest.raises((TypeError, PeerError)):
            step(None if group.rank else state, None)  # type: ignore[arg-type]
        checkpoint.save(tmp_path / str(group.rank), step, state)

    with pytest.raises(MismatchError, match=r"the folder is .* on rank 0 and .* on rank 1.*Remedy"):
        run_ranks(run, RANKS, timeout=20)


@pytest.mark.parametrize("where", ["coming back", "work", "telling"])
def test_an_interrupt_reaches_the_other_ranks(where: str) -> None:
    """Wherever it comes, in the work or in what is around it."""

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt("stop")

    def run(group: Group) -> str:
        work: Any = lambda: 1
        with contextlib.ExitStack() as stack:
            if group.rank == 0:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                if where == "coming back":
                    patch.setattr(failures, "check_same_call", interrupt)
                elif where == "telling":
                    patch.setattr(agreement, "labelled", interrupt)
                else:
                    work = interrupt
            try:
                agreement.together(group, "save to a folder", work)
            except BaseException as error:
                return f"{type(error).__name__}: {error}"
        return "nothing"

    guilty, other = run_ranks(run, RANKS, timeout=20)
    assert guilty == "KeyboardInterrupt: stop"
    assert other.startswith("PeerError: rank 0 failed: KeyboardInterrupt: stop")


def test_two_writers(saved: Any, tmp_path: Path) -> None:
    busy = Temporary(tmp_path / "step-000000000007")
    with pytest.raises(CheckpointError, match="another process is writing"):
        save_step(tmp_path, 1)
    assert busy.path.exists()
    busy.discard()
    save_step(tmp_path, 1)


@pytest.mark.parametrize(
    ("rank", "at"), tiers(thorough=[(0, 2), (1, 2), (0, 7)], full=[(1, 1), (1, 3)], rows=True)
)
def test_one_process_is_killed(tmp_path: Path, rank: int, at: int) -> None:
    """C2, over gloo: the other rank gets an error, and does not wait."""
    root = tmp_path / "root"

    def run() -> None:
        group = ProcessGroup(timeout=20)
        base, params, buffers = make_step()
        step = shard(base, level=3, group=group)
        state = trained(step, params, buffers, 1)
        checkpoint.save(root, step, state)
        state = trained(step, params, buffers, 2)
        if group.rank == rank:
            with Interposed(at, lambda: os.kill(os.getpid(), signal.SIGKILL), CALLS).installed():
                checkpoint.save(root, step, state)
        else:
            with pytest.raises(GroupError):
                checkpoint.save(root, step, state)

    with pytest.raises(GroupError, match=f"rank {rank} died"):
        launch(run, 2, start_method="fork", timeout=40)
    assert checkpoint.latest(root) == 1
    load_on(root, 1, 3)
    save_step(root, 2)
    assert not leftovers(root)


# C4: damage


def damage(name: str) -> Callable[[Path, Path], str]:
    """A way to damage a step's folder, given another step's; returns the name that the error must
    have."""
    first, manifest = "rank-00001-of-00002.safetensors", "manifest.json"
    rows = "rank-00001-of-00002.rows"

    def flip(file: Path, at: int) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)

    def swap(folder: Path, kind: str) -> None:
        one, two = sorted(folder.glob(kind))
        data = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(data)

    actions: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
        "flip the body": (first, lambda f, o: flip(f / first, -9)),
        "flip the header": (first, lambda f, o: flip(f / first, 40)),
        "flip the manifest": (manifest, lambda f, o: flip(f / manifest, 300)),
        "flip its checksum": (manifest, lambda f, o: flip(f / manifest, 7)),
        "cut the file": (
            first,
            lambda f, o: os.truncate(f / first, (f / first).stat().st_size - 1),
        ),
        "empty the file": (first, lambda f, o: os.truncate(f / first, 0)),
        "lengthen the file": (
            first,
            lambda f, o: (f / first).write_bytes((f / first).read_bytes() + b"x"),
        ),
        "cut the manifest": (manifest, lambda f, o: os.truncate(f / manifest, 500)),
        "empty the manifest": (manifest, lambda f, o: os.truncate(f / manifest, 0)),
        "lose the file": (first, lambda f, o: (f / first).unlink()),
        "lose the manifest": (manifest, lambda f, o: (f / manifest).unlink()),
        "swap the files": ("of-00002", lambda f, o: swap(f, "*.safetensors")),
        "another step's file": (first, lambda f, o: shutil.copy(o / first, f / first)),
        "another step's manifest": (manifest, lambda f, o: shutil.copy(o / manifest, f / manifest)),
        "flip the rows": (rows, lambda f, o: flip(f / rows, -9)),
        "flip the rows' header": (rows, lambda f, o: flip(f / rows, 30)),
        "cut the rows": (rows, lambda f, o: os.truncate(f / rows, (f / rows).stat().st_size - 8)),
        "empty the rows": (rows, lambda f, o: os.truncate(f / rows, 0)),
        "lose the rows": (rows, lambda f, o: (f / rows).unlink()),
        "swap the rows": ("of-00002.rows", lambda f, o: swap(f, "*.rows")),
        "another step's rows": (rows, lambda f, o: shutil.copy(o / rows, f / rows)),
        "rows that are a pipe": (rows, lambda f, o: ((f / rows).unlink(), os.mkfifo(f / rows))),
        "a link": (first, lambda f, o: ((f / first).unlink(), (f / first).symlink_to(o / first))),
        "a pipe": (first, lambda f, o: ((f / first).unlink(), os.mkfifo(f / first))),
        "a folder": (first, lambda f, o: ((f / first).unlink(), (f / first).mkdir())),
    }
    file, action = actions[name]

    def apply(folder: Path, other: Path) -> str:
        action(folder, other)
        return file

    apply.names = list(actions)  # type: ignore[attr-defined]
    return apply


DAMAGES: list[str] = damage("flip the body").names  # type: ignore[attr-defined]
QUICK_DAMAGES = [
    "flip the body",
    "another step's file",
    "another step's manifest",
    "another step's rows",
    "rows that are a pipe",
]


@pytest.mark.parametrize(
    "name", tiers(QUICK_DAMAGES, [name for name in DAMAGES if name not in QUICK_DAMAGES])
)
def test_damage_is_an_error_that_names_the_file(saved: Any, tmp_path: Path, name: str) -> None:
    """C4. And without a count, the step before is loaded, with a warning, when the damage shows
    without reading all."""
    old = saved[0]
    root = tmp_path / "root"
    shutil.copytree(old, root)
    shutil.copytree(old.parent / "two", root, dirs_exist_ok=True)
    file = damage(name)(root / "step-000000000002", root / "step-000000000001")
    assert file in str(checkpoint.verify(root)[2]) and checkpoint.verify(root)[1] == []

    def load(step: Any, like: Any) -> str:
        with pytest.raises(CorruptError) as caught:
            checkpoint.load(root, step, like=like, count=2)
        return str(caught.value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", checkpoint.CheckpointWarning)
        texts = on_ranks(3, 3, load, donate=False)
    assert len(set(texts)) == 1 and file in texts[0]
    if checkpoint_shows(root):
        with pytest.warns(checkpoint.CheckpointWarning, match="step 2 is passed over"):
            assert_same(load_on(root, 1, 3), saved[1])
    else:
        with pytest.raises(CorruptError, match="damaged"):
            load_on(root, 1, 3)


def checkpoint_shows(root: Path) -> bool:
    """Whether `latest` passes over step 2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", checkpoint.CheckpointWarning)
        return checkpoint.latest(root) == 1


def test_a_stale_file_is_reported_and_never_read(saved: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved[0], root)
    folder = root / "step-000000000001"
    shutil.copy(
        folder / "rank-00001-of-00002.safetensors", folder / "rank-00001-of-00004.safetensors"
    )
    assert "rank-00001-of-00004.safetensors: does not belong" in checkpoint.verify(root)[1][0]
    assert_same(load_on(root, 2, 3), saved[1])


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="steps found: none, and there is no such folder"):
        load_on(tmp_path / "none", 2, 3)
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint; steps found: none$"):
        checkpoint.export_weights(tmp_path, tmp_path / "out")
    save_step(tmp_path, 2)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7; steps found: 2"):
        load_on(tmp_path, 2, 3, count=7)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7; steps found: 2"):
        checkpoint.verify(tmp_path, count=7)
