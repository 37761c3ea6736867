"""The checksums of a file's blocks, by the names that a manifest gives them."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from .legacy import sums64

CHECKSUMS: dict[str, Callable[[memoryview], int]] = {"crc32": zlib.crc32, "sums64": sums64}
