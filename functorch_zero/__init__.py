"""functorch_zero: a JAX-style functional sharding library for PyTorch."""

from . import optim, testing
from .broadcast import broadcast
from .deferred import deferred
from .errors import (
    DonatedError,
    GroupError,
    LostPeerError,
    MismatchError,
    PeerError,
    StructureError,
    TransformError,
)
from .evaluation import eval_step
from .functional import functionalize
from .groups import CheckedGroup, CountingGroup, Group, ProcessGroup, ThreadGroup, launch
from .handle import gather
from .shard import shard
from .step import Aux, TrainState, train_step
from .tree import Params, named_leaves

__all__ = [
    "Aux",
    "CheckedGroup",
    "CountingGroup",
    "DonatedError",
    "Group",
    "GroupError",
    "LostPeerError",
    "MismatchError",
    "Params",
    "PeerError",
    "ProcessGroup",
    "StructureError",
    "ThreadGroup",
    "TrainState",
    "TransformError",
    "broadcast",
    "deferred",
    "eval_step",
    "functionalize",
    "gather",
    "launch",
    "named_leaves",
    "optim",
    "shard",
    "testing",
    "train_step",
]
