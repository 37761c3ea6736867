"""What Python calls inside of a block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def profiled(see: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call `see(frame, event, argument)` for each call and return of this thread."""
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
