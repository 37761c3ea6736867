"""Groups of ranks and their collectives: processes, threads, or one process that counts."""

from .coming_back import check_same_call
from .counting import Call, CountingGroup, RecordingGroup, counted
from .forwarding import rejoin, settle, sibling
from .labels import CheckedGroup, LabelledGroup, labelled
from .last_collectives import dump_on_signal
from .launch import launch
from .mesh import HybridGroup, as_group
from .process import ProcessGroup
from .protocol import Done, Group, ReduceOp, Work
from .single import SingleRank
from .threads import ThreadGroup, run_ranks
from .work import Then

__all__ = [
    "Call",
    "CheckedGroup",
    "CountingGroup",
    "Done",
    "Group",
    "HybridGroup",
    "LabelledGroup",
    "ProcessGroup",
    "RecordingGroup",
    "ReduceOp",
    "SingleRank",
    "Then",
    "ThreadGroup",
    "Work",
    "as_group",
    "check_same_call",
    "counted",
    "dump_on_signal",
    "labelled",
    "launch",
    "rejoin",
    "run_ranks",
    "settle",
    "sibling",
]
