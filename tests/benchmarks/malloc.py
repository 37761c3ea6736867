"""A library that counts what malloc gives away (`malloc_peak.c`, which needs gcc), for processes
that are started meanwhile."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def preloaded() -> Iterator[None]:
    """New processes have the library."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "malloc_peak.so"
        source = Path(__file__).with_name("malloc_peak.c")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        os.environ["LD_PRELOAD"] = str(library)
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"]


def counts() -> ctypes.CDLL:
    """In such a process: `malloc_live()` and `malloc_peak()` in bytes, and `malloc_reset()`."""
    libc = ctypes.CDLL(None)
    libc.malloc_live.restype = libc.malloc_peak.restype = ctypes.c_long
    return libc
