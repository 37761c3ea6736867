"""torch.optim's state dicts in and out, for the optimizers that both have, so that a run started
there goes on here.

Shared: SGD, Adam (also amsgrad), AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop,
and any class that `from_torch` wraps. Only states are carried over; give both optimizers the same
hyperparameters. Whole states only: import before sharding, export after gathering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from ...errors import StructureError
from ...tree import map_with_paths, paths
from ..contrib.rprop import ScaleByRpropState
from ..optimizers.adadelta import ScaleByAdaDeltaState
from ..optimizers.adagrad import ScaleByRssState
from ..optimizers.adamax import ScaleByAdamaxState
from ..optimizers.amsgrad import ScaleByAmsgradState
from ..optimizers.nadam import ScaleByNadamState
from ..optimizers.rmsprop import ScaleByRmsState, ScaleByStddevState
from ..states import CountState, ScaleByLearningRateState, find_states, replace_states
from ..transforms.moments import ScaleByAdamState
from ..transforms.momentum import TraceState
from .frameworks import FromTorchState

# Our fields, and torch's names for what they hold: trees like params, or one of `_NUMBERS`
# Kinds without such fields are here for their counts; a FromTorchState has torch's names itself
_TORCHS: dict[type[Any], dict[str, str]] = {
    CountState: {},
    FromTorchState: {},
    ScaleByLearningRateState: {},
    TraceState: {"trace": "momentum_buffer"},
    ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    ScaleByAmsgradState: {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"},
    ScaleByAdamaxState: {"mu": "exp_avg", "nu": "exp_inf"},
    ScaleByNadamState: {"mu": "exp_avg", "nu": "exp_avg_sq", "mu_product": "mu_product"},
    ScaleByRssState: {"sum_of_squares": "sum"},
    ScaleByRmsState: {"nu": "square_avg"},
    ScaleByStddevState: {"mu": "grad_avg", "nu": "square_avg"},
    ScaleByAdaDeltaState: {"e_g": "square_avg", "e_x": "acc_delta"},
    ScaleByRpropState: {"step_sizes": "step_size", "prev_updates": "prev"},
}
# torch's names for numbers that it keeps per param, and we once
_NUMBERS = {"mu_product"}

# A param's dotted path -> torch's state of it: tensors like the param and numbers, by torch's names
ByName = dict[str, dict[str, Any]]


def import_torch_state(
    opt_state: Any,
    state_dict: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
    step: int | None = None,
) -> Any:
    """An optimizer state that goes on where a torch optimizer was.

    Args:
        opt_state: our optimizer's state, as `init` made it; its structure stays.
        state_dict: the torch optimizer's `state_dict()`.
        names: the dotted paths of the params in the order in which that optimizer was given them,
            for a whole model `[name for name, _ in model.named_parameters()]`. None: the state dict
            has them (`param_names`).
        step: how many steps were taken. None: the state dict has it (SGD's has not: then 1 with
            momentum, else 0).

    Raises:
        StructureError: a param or a state of one is missing, of another shape, or at another step
            than the rest. Or torch keeps something for a param that `opt_state` has no place for.
        ValueError: the state dict has no names and none are passed, or another number of them.

    Params for which torch has no state (they never had a gradient) keep what `init` made.
    """
    # From numbers in the torch optimizer's order to paths in ours
    by_name = _by_name(state_dict, names)
    # 0-d int64, on the CPU
    count = torch.tensor(_steps(by_name) if step is None else step, device="cpu")
    taken = {"step"}  # of torch's names

    def convert(old: Any) -> Any:
        own_trees, own_numbers = _by_torchs_names(old)
        taken.update(own_trees, own_numbers)
        trees = {
            key: map_with_paths(partial(_import_leaf, by_name, key), tree)
            for key, tree in own_trees.items()
        }
        numbers = {key: _import_number(x, by_name, key) for key, x in own_numbers.items()}
        if isinstance(old, FromTorchState):
            return FromTorchState(count.clone(), trees, numbers)
        imported = trees | numbers
        new = {field: imported[key] for field, key in _TORCHS[type(old)].items()}
        # A clone for each: states may be donated, and no two may share a tensor
        if "count" in old._fields:
            new["count"] = count.clone()
        return old._replace(**new)

    # A chain may hold several kinds; each is filled from the one torch state
    for kind in _TORCHS:
        opt_state = replace_states(opt_state, kind, convert)
    for name, entry in by_name.items():
        left = [key for key, value in entry.items() if value is not None and key not in taken]
        if left:
            raise StructureError(
                "torch's optimizer keeps something that this state has no place for",
                path=name,
                expected=f"a state with {', '.join(left)}",
                got=type(opt_state).__name__,
                remedy="pass what init of the transform with torch's numerics made",
            )
    return opt_state


def export_torch_state(
    opt_state: Any, optimizer: torch.optim.Optimizer, *, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """A state dict for a torch optimizer:
    `optimizer.load_state_dict(export_torch_state(opt_state, optimizer))`.

    Args:
        opt_state: our optimizer's state, whole.
        optimizer: of the class that ours shares its numerics with. It isn't changed; its
            hyperparameters stay.
        names: see `import_torch_state`.

    Raises:
        ValueError: the optimizer has no names and none are passed, or another number of them.
    """
    # Its param groups stay; only "state" is replaced
    own = optimizer.state_dict()
    by_name: ByName = {}
    counts = [0]  # steps, of each part that counts them
    for kind in _TORCHS:
        for state in find_states(opt_state, kind):
            if "count" in state._fields:  # all tuples have a method of that name
                counts.append(int(state.count))
            _export(by_name, *_by_torchs_names(state))
    # torch counts per param, in float32; SGD keeps no count
    if not isinstance(optimizer, torch.optim.SGD):
        for entry in by_name.values():
            entry["step"] = torch.tensor(float(max(counts)), device="cpu")
    # Params of which we keep nothing have no entry, as in torch before their first gradient
    order = _order(own, names)
    state = {i: by_name[name] for i, name in order.items() if name in by_name}
    return own | {"state": state}


def _by_torchs_names(state: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state's trees like params, and the numbers that torch keeps for each param."""
    if isinstance(state, FromTorchState):
        return state.like_params, state.numbers
    found = {key: getattr(state, field) for field, key in _TORCHS[type(state)].items()}
    numbers = {key: found.pop(key) for key in _NUMBERS & found.keys()}
    return found, numbers


def _export(by_name: ByName, trees: dict[str, Any], numbers: dict[str, Tensor]) -> None:
    """Add a state to torch's."""
    for key, tree in trees.items():
        for name, leaf in zip(paths(tree), optree.tree_leaves(tree), strict=True):
            # Several links of a chain may add to one param's state
            entry = by_name.setdefault(name, {})
            for number_key, value in numbers.items():
                entry[number_key] = value.float()
            # A clone: our state may be donated to the next step
            entry[key] = leaf.detach().clone()


def _order(state_dict: Mapping[str, Any], names: Sequence[str] | None) -> dict[int, str]:
    """torch's number of each param -> its dotted path."""
    indices: list[int] = []  # torch's numbers of params, group by group
    own_names: list[str] = []  # their paths, if the optimizer was made with names
    for group in state_dict["param_groups"]:
        indices += group["params"]
        own_names += group.get("param_names", [])
        if names is None and "param_names" not in group:
            raise ValueError(
                "the torch optimizer was made without names, so which state is whose isn't known. "
                "Remedy: pass names, the dotted paths of its params in its order"
            )
    if names is None:
        names = own_names
    if len(names) != len(indices):
        raise ValueError(
            f"the torch optimizer has {len(indices)} params, got {len(names)} names. Remedy: pass "
            "one name per param, in its order"
        )
    return dict(zip(indices, names, strict=True))


def _by_name(state_dict: Mapping[str, Any], names: Sequence[str] | None) -> ByName:
    """torch's states by their params' dotted paths, without those that are None."""
    order = _order(state_dict, names)
    by_name: ByName = {}
    # Older versions of torch keep None for the momentum of an SGD without one
    for i, entry in state_dict["state"].items():
        by_name[order[i]] = {key: value for key, value in entry.items() if value is not None}
    return by_name


def _steps(by_name: ByName) -> int:
    """The number of steps that all params have taken."""
    # Path -> steps
    steps = {name: int(entry["step"]) for name, entry in by_name.items() if "step" in entry}
    most = max(steps.values(), default=0)
    # We keep one count for all params, so different ones can't be carried over
    for name, step in steps.items():
        if step != most:
            story = "the params are at different steps"
            remedy = "pass step, if one count will do for all"
            raise StructureError(story, path=name, expected=most, got=step, remedy=remedy)
    if steps:
        return most
    # SGD keeps none: only its first step differs from others, in the momentum it makes
    return int(any("momentum_buffer" in entry for entry in by_name.values()))


def _import_leaf(by_name: ByName, key: str, name: str, leaf: Tensor) -> Tensor:
    entry = by_name.get(name)
    # It never had a gradient there
    if not entry:
        return leaf
    remedy = "check names, and that both optimizers have the same options"
    if key not in entry:
        story, got = "torch's state lacks a part", list(entry)
        raise StructureError(story, path=name, expected=key, got=got, remedy=remedy)
    tensor: Tensor = entry[key]
    if tensor.shape != leaf.shape:
        raise StructureError(
            f"torch's {key} has another shape",
            path=name,
            expected=tuple(leaf.shape),
            got=tuple(tensor.shape),
            remedy=remedy,
        )
    # A copy: a state dict shares its optimizer's tensors
    return tensor.detach().to(leaf.device, leaf.dtype, copy=True)


def _import_number(value: Tensor, by_name: ByName, key: str) -> Tensor:
    """A number that torch keeps for each param, and we once."""
    # The first param that has it speaks for all
    for entry in by_name.values():
        if key in entry:
            number: Tensor = entry[key]
            return number.detach().to("cpu", value.dtype, copy=True)
    return value
