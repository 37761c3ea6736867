"""torch.optim's state dicts in and out, for the optimizers that both have, so that a run started
there goes on here.

Shared: SGD, Adam (also amsgrad), AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop,
and any class that `from_torch` wraps. Only states are carried over; give both optimizers the same
hyperparameters. Whole states only: import before sharding, export after gathering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ...errors import StructureError, explain
from ...tree import paths
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

# Our fields that are like params, and torch's names for them.
_LIKE_PARAMS: dict[type[Any], dict[str, str]] = {
    CountState: {},
    ScaleByLearningRateState: {},
    TraceState: {"trace": "momentum_buffer"},
    ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    ScaleByAmsgradState: {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"},
    ScaleByAdamaxState: {"mu": "exp_avg", "nu": "exp_inf"},
    ScaleByNadamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    ScaleByRssState: {"sum_of_squares": "sum"},
    ScaleByRmsState: {"nu": "square_avg"},
    ScaleByStddevState: {"mu": "grad_avg", "nu": "square_avg"},
    ScaleByAdaDeltaState: {"e_g": "square_avg", "e_x": "acc_delta"},
    ScaleByRpropState: {"step_sizes": "step_size", "prev_updates": "prev"},
}
_NUMBERS: dict[type[Any], dict[str, str]] = {ScaleByNadamState: {"mu_product": "mu_product"}}

ByName = dict[str, dict[str, Any]]  # a param's dotted path -> torch's state of it


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
            than the rest.

    Params for which torch has no state (they never had a gradient) keep what `init` made.
    """
    by_name = _by_name(state_dict, names)
    count = torch.tensor(_steps(by_name) if step is None else step)
    for kind, fields in _LIKE_PARAMS.items():
        numbers = _NUMBERS.get(kind, {})

        def convert(
            old: Any, fields: dict[str, str] = fields, numbers: dict[str, str] = numbers
        ) -> Any:
            new = {
                field: _import_tree(getattr(old, field), by_name, key)
                for field, key in fields.items()
            }
            new |= {
                field: _import_number(getattr(old, field), by_name, key)
                for field, key in numbers.items()
            }
            return old._replace(
                **new, **({"count": count.clone()} if "count" in old._fields else {})
            )

        opt_state = replace_states(opt_state, kind, convert)

    def convert_wrapped(old: FromTorchState) -> FromTorchState:
        trees = {key: _import_tree(tree, by_name, key) for key, tree in old.like_params.items()}
        numbers = {key: _import_number(value, by_name, key) for key, value in old.numbers.items()}
        return FromTorchState(count.clone(), trees, numbers)

    return replace_states(opt_state, FromTorchState, convert_wrapped)


def export_torch_state(
    opt_state: Any, optimizer: torch.optim.Optimizer, *, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """A state dict for a torch optimizer:
    `optimizer.load_state_dict(export_torch_state(opt_state, optimizer))`.

    Args:
        opt_state: our optimizer's state, whole.
        optimizer: of the class that ours shares its numerics with. It isn't changed; its
            hyperparameters are kept.
        names: see `import_torch_state`.
    """
    own = optimizer.state_dict()
    by_name: ByName = {}
    counts = [0]
    for kind, fields in _LIKE_PARAMS.items():
        for state in find_states(opt_state, kind):
            counts.append(int(getattr(state, "count", 0)) if "count" in state._fields else 0)
            numbers = {key: getattr(state, field) for field, key in _NUMBERS.get(kind, {}).items()}
            _export(by_name, {key: getattr(state, field) for field, key in fields.items()}, numbers)
    for state in find_states(opt_state, FromTorchState):
        counts.append(int(state.count))
        _export(by_name, state.like_params, state.numbers)
    if not isinstance(optimizer, torch.optim.SGD):
        for kept in by_name.values():
            kept["step"] = torch.tensor(float(max(counts)))
    order = _order(own, names)
    return {
        "state": {i: by_name[name] for i, name in order.items() if name in by_name},
        **{key: value for key, value in own.items() if key != "state"},
    }


def _export(by_name: ByName, trees: Mapping[str, Any], numbers: Mapping[str, Tensor]) -> None:
    for key, tree in trees.items():
        for name, leaf in zip(paths(tree), optree.tree_leaves(tree), strict=True):
            by_name.setdefault(name, {}).update({k: v.float() for k, v in numbers.items()})
            by_name[name][key] = leaf.detach().clone()


def _order(state_dict: Mapping[str, Any], names: Sequence[str] | None) -> dict[int, str]:
    """torch's number of each param -> its dotted path."""
    groups = state_dict["param_groups"]
    indices = [i for group in groups for i in group["params"]]
    if names is None:
        if not all("param_names" in group for group in groups):
            raise ValueError(
                "the torch optimizer was made without names, so which state is whose isn't known. "
                "Remedy: pass names, the dotted paths of its params in its order"
            )
        names = [name for group in groups for name in group["param_names"]]
    if len(names) != len(indices):
        raise ValueError(f"the torch optimizer has {len(indices)} params, got {len(names)} names")
    return dict(zip(indices, names, strict=True))


def _by_name(state_dict: Mapping[str, Any], names: Sequence[str] | None) -> ByName:
    order = _order(state_dict, names)
    return {
        order[i]: {k: v for k, v in kept.items() if v is not None}
        for i, kept in state_dict["state"].items()
    }


def _steps(by_name: ByName) -> int:
    steps = {name: int(kept["step"]) for name, kept in by_name.items() if "step" in kept}
    if len(set(steps.values())) > 1:
        name = next(n for n, s in steps.items() if s != max(steps.values()))
        remedy = "pass step, if one count will do for all"
        raise StructureError(
            explain(
                "the params are at different steps",
                path=name,
                expected=max(steps.values()),
                got=steps[name],
                remedy=remedy,
            )
        )
    return next(
        iter(steps.values()), int(any("momentum_buffer" in kept for kept in by_name.values()))
    )


def _import_tree(tree: Any, by_name: ByName, key: str) -> Any:
    leaves, treedef = optree.tree_flatten(tree)
    return treedef.unflatten(
        [_import_leaf(n, x, by_name, key) for n, x in zip(paths(tree), leaves, strict=True)]
    )


def _import_leaf(name: str, leaf: Tensor, by_name: ByName, key: str) -> Tensor:
    kept = by_name.get(name)
    if not kept:
        return leaf
    remedy = "check names, and that both optimizers have the same options"
    if key not in kept:
        raise StructureError(
            explain(
                "torch's state lacks a part", path=name, expected=key, got=list(kept), remedy=remedy
            )
        )
    if kept[key].shape != leaf.shape:
        expected, got = tuple(leaf.shape), tuple(kept[key].shape)
        raise StructureError(
            explain(
                f"torch's {key} has another shape",
                path=name,
                expected=expected,
                got=got,
                remedy=remedy,
            )
        )
    tensor: Tensor = kept[key]
    return tensor.detach().to(leaf.device, leaf.dtype, copy=True)


def _import_number(value: Tensor, by_name: ByName, key: str) -> Tensor:
    """A number that torch keeps for each param, and we once."""
    found = [kept[key] for kept in by_name.values() if key in kept]
    return found[0].detach().to("cpu", value.dtype, copy=True) if found else value
