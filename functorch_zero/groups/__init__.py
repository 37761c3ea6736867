"""Groups of ranks and their collectives: processes, threads, or one process that counts."""

from .counting import Call, CountedGroup, CountingGroup, counted
from .forwarding import rejoin, sibling
from .given import as_group
from .hybrid import HybridGroup
from .labels import CheckedGroup, LabelledGroup, labelled
from .launch import launch
from .process import ProcessGroup
from .protocol import Done, Group, ReduceOp, Work
from .solo import Solo
from .threads import ThreadGroup, run_ranks

__all__ = [
    "Call",
    "CheckedGroup",
    "CountedGroup",
    "CountingGroup",
    "Done",
    "Group",
    "HybridGroup",
    "LabelledGroup",
    "ProcessGroup",
    "ReduceOp",
    "Solo",
    "ThreadGroup",
    "Work",
    "as_group",
    "counted",
    "labelled",
    "launch",
    "rejoin",
    "run_ranks",
    "sibling",
]
