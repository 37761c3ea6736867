"""Freed memory stays in the process, between steps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
import torch
from functorch_zero.heap import keep_freed_memory

sbrk = ctypes.CDLL(None).sbrk
sbrk.restype, sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
if sys.argv[1] == "kept":
    keep_freed_memory()
ends = []
for _ in range(4):
    blocks = [torch.empty(2**20, dtype=torch.uint8) for _ in range(40)]
    ends.append(sbrk(0))
    del blocks
    ends.append(sbrk(0))
print(max(before - after for before, after in zip(ends[2::2], ends[3::2])) // 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
def test_what_is_freed_is_given_back_unless_it_is_kept() -> None:
    def given_back(how: str) -> int:
        environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}  # without settings of malloc
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return int(ran.stdout.split()[-1])

    assert given_back("kept") == 0
    # what imports free decides in some processes that this much is kept anyway
    assert any(given_back("not kept") >= 20 for _ in range(12))
