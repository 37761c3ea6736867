"""What torch.distributed.checkpoint does with checkpoints that are damaged, half written, hostile
or of another model.

    $ PYTHONPATH=. python tests/benchmarks/dcp_faults.py  # every case, in one process

A small state is saved, something happens to the folder, and it is loaded again: what was raised, or
what came back. Ours are tests: test_faults.py, test_manifest.py and test_save_load.py in
tests/checkpoint.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

State = dict[str, Tensor]


def state_of(step: int) -> State:
    return {name: torch.full((1000,), float(step)) for name in ("a", "b")}


def save(folder: Path, step: int) -> None:
    dcp.save(state_of(step), storage_writer=dcp.FileSystemWriter(folder, thread_count=2))


def load(folder: Path, like: State) -> str:
    try:
        dcp.load(like, storage_reader=dcp.FileSystemReader(folder))
    except BaseException as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return "no error; " + ", ".join(
        f"{k} is {sorted(set(v.tolist()))} ({v.dtype})" for k, v in like.items()
    )


def flip(folder: Path) -> str:
    """a bit of a tensor flips on disk"""
    save(folder, 1)
    file = min(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[data.index(torch.ones(10).numpy().tobytes()) + 3] ^= 0x40
    file.write_bytes(data)
    return load(folder, state_of(0))


def killed(folder: Path) -> str:
    """a save of step 2 over step 1 is killed at its second flush to disk"""
    save(folder, 1)
    child = os.fork()
    if not child:
        flushed, fsync = [0], os.fsync

        def dies(file: Any) -> None:
            fsync(file)
            flushed[0] += 1
            if flushed[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = dies  # type: ignore[assignment]
        dcp.save(
            state_of(2), storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False)
        )
        os._exit(0)
    os.waitpid(child, 0)
    return load(folder, state_of(0))


class Marker:
    """Pickled, it makes a folder when it is unpickled: harmless, where a hostile file's wouldn't
    be."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path) -> str:
    """its metadata are somebody's pickle"""
    save(folder, 1)
    (folder / ".metadata").write_bytes(pickle.dumps(Marker(folder / "marker")))
    said = load(folder, state_of(0))
    return (
        f"{'its code was run' if (folder / 'marker').exists() else 'nothing was run'}; then {said}"
    )


def dtype(folder: Path) -> str:
    """float32 was saved, int64 is wanted"""
    dcp.save({"a": torch.arange(5) + 0.75}, checkpoint_id=folder)
    return load(folder, {"a": torch.zeros(5, dtype=torch.int64)})


def extra(folder: Path) -> str:
    """a leaf that was saved is not wanted"""
    save(folder, 1)
    return load(folder, {"a": torch.zeros(1000)})


def again(folder: Path) -> str:
    """a step that is there already is saved once more, and the disk is full meanwhile"""
    save(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        save(folder, 2)
        said = "saved"
    except BaseException as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return f"{said}; then {load(folder, state_of(0))}"


def background(folder: Path) -> str:
    """an asynchronous save fails, and nobody asks for its result"""
    folder.write_text("a file where the folder should be")
    init_file = folder.with_name("ranks")
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=0, world_size=1)
    try:
        result = dcp.async_save(state_of(1), checkpoint_id=folder)
        while not result.done():
            time.sleep(0.01)
        dcp.save(state_of(2), checkpoint_id=folder.with_name("next"))
        said = (
            "nothing was raised, and the next save went well; asked, it says "
            f"{type(result.exception()).__name__}"
        )
    except BaseException as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    dist.destroy_process_group()
    return said


CASES: dict[str, Callable[[Path], str]] = {
    f.__name__: f for f in (flip, killed, hostile, dtype, extra, again, background)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), metavar="case", help=", ".join(CASES)
    )
    warnings.filterwarnings("ignore")
    for case in parser.parse_args().cases:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{case}: {CASES[case].__doc__}\n  {CASES[case](Path(folder, 'it'))}", flush=True)


if __name__ == "__main__":
    main()
