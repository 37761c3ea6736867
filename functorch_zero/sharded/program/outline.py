"""How a program's `init` cuts its value: found on trees without values, and without asking another
rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...layout.sharded_tree import Holding, ShardedTree, hold
from ...optim.base import Transform
from ...params import Engine
from ...sharded_optim.sharded_state import ShardedOptState, StateHolding
from ...sharded_optim.state_plan import plan_state
from ...step.program_step import ProgramStep
from ...tree import select
from ..refit import without_values
from .value import Nodes, ValueStructure, as_marked, without_pieces


class OutlineEngine:
    """The engine of trees without values. Functions that ask other ranks aren't there."""

    def __init__(self, engine: Engine):
        self.rank, self.keeps_tensors = engine.rank, engine.keeps_tensors
        self.pieces, self.zero_updates = engine.pieces, engine.zero_updates

    def init(self, transform: Transform, params: ShardedTree) -> ShardedOptState:
        """The optimizer's state, without values."""
        layout = params.sharding.layout
        plan = plan_state(transform.init_fn, layout, layout.trainable, layout.num_ranks)
        made = transform.init_on_meta(select(without_values(layout), layout.trainable))
        return ShardedOptState(made, StateHolding(params.sharding, plan, engine=params.engine))


def structure_made_of(
    step: ProgramStep, given: Mapping[str, Any], engine: Engine
) -> ValueStructure | None:
    """The structure of the value that a program's `init` makes. None: it asks for values, or for
    other ranks.

    Args:
        given: the arguments of `init`, by name. Trees are cut: of them, a `Holding`.
        engine: of the trees of the state's value.
    """
    outlining: Any = OutlineEngine(engine)
    args = [
        _outlined(arg, outlining) if isinstance(arg, Holding) else arg for arg in given.values()
    ]
    try:
        # What `init` draws elsewhere is undone
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            value = without_pieces(step.first_value(*args))
    except Exception:  # a user's init may raise anything where values are missing
        return None
    return Nodes.of(as_marked(value, step.nameless)).structure.on(engine)


def _outlined(holding: Holding, engine: Engine) -> ShardedTree:
    """A tree without values that is cut so."""
    return hold(without_values(holding.sharding.layout), replace(holding, engine=engine))
