"""The checksums of a file's blocks, by the names that a manifest gives them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from .legacy import sums64


def crc32(views: Sequence[memoryview]) -> int:
    """The CRC-32 of a block's bytes, which lie in several places."""
    found = 0
    for view in views:
        found = zlib.crc32(view, found)
    return found


CHECKSUMS: dict[str, Callable[[Sequence[memoryview]], int]] = {"crc32": crc32, "sums64": sums64}
