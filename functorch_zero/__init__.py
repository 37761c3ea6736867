"""functorch_zero: a JAX-style functional sharding library for PyTorch."""

from typing import TYPE_CHECKING, Any

from . import compress, errors, groups, optim, places
from .groups import Group, HybridGroup, ProcessGroup, launch
from .model.deferred_init import deferred_init
from .model.functionalize import functionalize
from .optim.apply_updates import apply_updates
from .params import Params
from .precision import Precision
from .sharded import batch, data
from .sharded.api import shard
from .sharded.describe import describe
from .sharded.failures import propagate_failures
from .sharded.loop import any_rank, broadcast
from .sharded.program.shard_tree import shard_tree
from .step import random
from .step.evaluate import eval_step
from .step.host import host
from .step.hvp import hvp
from .step.loss import Aux
from .step.nonfinite import LossScale
from .step.program import dot, pieces, unshard, value_and_grad, zero_updates
from .step.program_step import program_step
from .step.state import State
from .step.train import train_step
from .tree import named_leaves
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import checkpoint, testing
    from .planning.api import plan as plan

__all__ = [
    "Aux",
    "Group",
    "HybridGroup",
    "LossScale",
    "Params",
    "Precision",
    "ProcessGroup",
    "State",
    "any_rank",
    "apply_updates",
    "batch",
    "broadcast",
    "checkpoint",
    "compress",
    "data",
    "deferred_init",
    "describe",
    "dot",
    "errors",
    "eval_step",
    "functionalize",
    "groups",
    "host",
    "hvp",
    "launch",
    "named_leaves",
    "optim",
    "pieces",
    "places",
    "plan",
    "program_step",
    "propagate_failures",
    "random",
    "shard",
    "shard_tree",
    "testing",
    "train_step",
    "unshard",
    "value_and_grad",
    "zero_updates",
]


def __dir__() -> list[str]:
    """The public names, and not the modules that define them."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: `plan`, `checkpoint` and `testing` take long."""
    from importlib import import_module

    if name == "plan":
        return import_module(".planning.api", __name__).plan
    if name in ("checkpoint", "testing"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
