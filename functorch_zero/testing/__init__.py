"""For users: run ranks as threads, check a transform, prove a step, of this library or of any
engine. `strategies` needs Hypothesis, the rest doesn't."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..groups import run_ranks
from .equality import Equality, ProvesNothing, assert_equal_updates, assert_equal_values
from .parallel import assert_parallel_equals_reference
from .recorder import Recorder
from .step import assert_sharded_equals_unsharded
from .transforms import check_transform

if TYPE_CHECKING:
    from . import strategies

__all__ = [
    "Equality",
    "ProvesNothing",
    "Recorder",
    "assert_equal_updates",
    "assert_equal_values",
    "assert_parallel_equals_reference",
    "assert_sharded_equals_unsharded",
    "check_transform",
    "run_ranks",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Import `strategies`, and with it Hypothesis, only when it is asked for."""
    if name == "strategies":
        return import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
