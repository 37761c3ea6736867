"""Hyperparameters that can be read and changed between steps: `inject_hyperparams` and
`reduce_on_plateau`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...params import as_local
from ..across import Across
from ..arithmetic import Tree, elementwise, number
from ..base import Transform, pointwise, step_count, value_of
from ..naming import arguments_of, named
from ..states import find_states, only_state, replace_states
from .wrappers import wrapper


class InjectHyperparamsState(NamedTuple):
    """Hyperparameters, and the state of the transform that is made with them."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    hyperparams: dict[str, Tensor]  # each 0-d float64, on the CPU
    inner_state: Any  # of the transform made of these hyperparameters


def inject_hyperparams(
    inner_factory: Callable[..., Transform], static_args: Iterable[str] = ()
) -> Callable[..., Transform]:
    """Keep a transform's hyperparameters in its state. As optax.inject_hyperparams.

    Floats, 0-d tensors and schedules among the arguments become 0-d tensors in the state, a
    schedule's value as of the latest step; ints, bools and everything else stay what they are. Read
    them with `hyperparams(state)`, and change them with `with_hyperparams(state, learning_rate=…)`,
    on every rank alike. Needs, communication and the rest of the state: the transform's.

    >>> from functorch_zero import optim
    >>> decay = optim.linear_schedule(0.0, 1.0, 9)
    >>> optimizer = optim.inject_hyperparams(optim.adamw)(learning_rate=1e-3, weight_decay=decay)

    Args:
        inner_factory: a function of hyperparameters that returns a transform; it must not compare
            or branch on those, nor call `inject_hyperparams` itself.
        static_args: names of arguments to leave alone.

    Raises:
        ValueError: by `init`: one `inject_hyperparams` lies inside of another.
    """
    static = set(static_args)
    signature = inspect.signature(inner_factory)

    def make(*args: Any, **kwargs: Any) -> Transform:
        # Defaults count as arguments: a default learning rate can be changed, too
        bound = signature.bind(*args, **kwargs)
        # For ranks to compare: the first values, whatever the state's are
        made_with = {"inner_factory": inner_factory} | arguments_of(bound)
        # Floats and 0-d tensors lie in the state; schedules are asked anew in each step
        numbers: dict[str, Tensor] = {}  # each 0-d float64, on the CPU
        schedules: dict[str, Callable[[Tensor], Any]] = {}
        for name, value in bound.arguments.items():
            if name in static:
                continue
            if _is_number(value):
                numbers[name] = number(value)
            elif _is_schedule(value):
                schedules[name] = value

        def build(values: dict[str, Tensor]) -> Transform:
            # The call once more, with 0-d tensors where numbers and schedules stood
            again = inspect.BoundArguments(signature, dict(bound.arguments) | values)
            return inner_factory(*again.args, **again.kwargs)

        injected = _injected(build, numbers, schedules)
        return replace(injected, name="inject_hyperparams", hyperparams=made_with)

    return make


def _is_schedule(value: Any) -> bool:
    """Whether it's a function of one argument; functions of a path and a leaf, and transforms, are
    not."""
    if not callable(value) or isinstance(value, type):
        return False
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    # A function (path, leaf) has two: a mask or labels, not a schedule
    num_required = 0
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind in positional and parameter.default is parameter.empty:
            num_required += 1
    return num_required == 1


def _is_number(value: Any) -> bool:
    # Not ints: they count steps, blocks or iterations, and factories branch on them
    return isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0)


def _injected(
    build: Callable[[dict[str, Tensor]], Transform],
    numbers: dict[str, Tensor],
    schedules: dict[str, Callable[[Tensor], Any]],
) -> Transform:
    """The transform that `build` makes of hyperparameters, with these in its state.

    Args:
        build: a function of the hyperparameters, by name.
        numbers: the first values of those that are read from the state.
        schedules: those that are taken anew at each step.
    """

    def scheduled(count: Tensor) -> dict[str, Tensor]:
        return {name: number(value_of(schedule, count)) for name, schedule in schedules.items()}

    # Made of the first values, for all that doesn't depend on them: needs, structure, `init`
    first = build(numbers | scheduled(step_count()))

    def init(params: Tree, across: Across) -> InjectHyperparamsState:
        inner_state = first.init(params, across)
        # The inner one reads its own state: a change of the outer numbers would not reach it
        if find_states(inner_state, InjectHyperparamsState):
            raise ValueError(
                "inject_hyperparams inside of another would keep its first numbers, whatever the "
                "outer ones are. Remedy: one inject_hyperparams, around a function of all numbers"
            )
        # Clones: states may be donated, and each `init` needs tensors of its own
        values = {name: value.clone() for name, value in numbers.items()} | scheduled(step_count())
        return InjectHyperparamsState(step_count(), values, inner_state)

    def update(
        updates: Tree, state: InjectHyperparamsState, params: Tree, across: Across
    ) -> tuple[Tree, InjectHyperparamsState]:
        # A schedule's value replaces that of the step before
        values = state.hyperparams | scheduled(state.count)
        # The transform is made anew of this step's values; nothing in it outlives the step
        now = build(values)
        updates, inner_state = now.update(updates, state.inner_state, params, across)
        return updates, InjectHyperparamsState(state.count + 1, values, inner_state)

    return wrapper(first, init, update, has_own_work=False)


def hyperparams(state: Any) -> dict[str, Tensor]:
    """The hyperparameters that `inject_hyperparams` keeps in an optimizer's state, by name: copies,
    so that `with_hyperparams` alone changes them, and no step writes over those that a log keeps.

    Raises:
        ValueError: the state holds no inject_hyperparams, or several.
    """
    remedy = "pass the part that holds one"
    # Numbers are here wherever the rest of a state lies
    found = only_state(
        as_local(state), InjectHyperparamsState, made_by="inject_hyperparams", remedy=remedy
    )
    return {name: value.clone() for name, value in found.hyperparams.items()}


def with_hyperparams(state: Any, **values: float | Tensor) -> Any:
    """A state with some hyperparameters changed, wherever `inject_hyperparams` keeps them in it.

    Call it on every rank with the same values; nothing is communicated. Scheduled ones can't be
    changed: the next step would overwrite them.

    Raises:
        ValueError: a name that no state there has.
    """
    known: set[str] = set()  # names in any of the states
    for found in find_states(as_local(state), InjectHyperparamsState):
        known |= found.hyperparams.keys()
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"no such hyperparameters: {unknown}. Remedy: change some of {sorted(known)}"
        )

    def change(old: InjectHyperparamsState) -> InjectHyperparamsState:
        # A state has some of the names; others may belong to another inject_hyperparams
        changed = dict(old.hyperparams)
        for name in changed.keys() & values.keys():
            # A tensor of the state's own: a step may overwrite it, and the caller has the other
            changed[name] = number(values[name]).clone()
        return old._replace(hyperparams=changed)

    return replace_states(state, InjectHyperparamsState, change)


class ReduceLROnPlateauState(NamedTuple):
    """The history of a metric. All 0-d, on the CPU, and the same on every rank."""

    scale: Tensor  # float64: the factor of updates
    best_value: Tensor  # float64: the least mean of the metric so far
    plateau_count: Tensor  # int64: means in a row that weren't better
    cooldown_count: Tensor  # int64: means to come that don't count
    count: Tensor  # type: ignore[assignment]  # int64: values since the last mean
    avg_value: Tensor  # float64: their mean
    rules: PlateauRules


class PlateauRules(NamedTuple):
    """The arguments of `reduce_on_plateau`, which `observe` reads from the state. All 0-d float64,
    on the CPU."""

    factor: Tensor  # of the scale, each time it falls
    patience: Tensor  # means in a row
    rtol: Tensor  # share of the best mean
    atol: Tensor  # in the metric's unit
    cooldown: Tensor  # means
    accumulation_size: Tensor  # values per mean
    min_scale: Tensor  # least factor of updates


@named
def reduce_on_plateau(
    factor: float = 0.1,
    patience: int = 10,
    rtol: float = 1e-4,
    atol: float = 0.0,
    cooldown: int = 0,
    accumulation_size: int = 1,
    min_scale: float = 0.0,
) -> Transform:
    """Multiply updates by a scale that falls while a metric has stopped falling. As
    optax.contrib's.

    The metric comes by `state = observe(state, value)` rather than as an argument of `update`. Call
    it between steps, as often as you like: with each step's loss, or each epoch's. State: 13
    numbers. No communication.

    Args:
        factor: of the scale, when the metric hasn't been better for `patience` means.
        patience: how many.
        rtol: how much less than the best a mean must be, relatively, to be better.
        atol: and absolutely.
        cooldown: means after a change that don't count.
        accumulation_size: values in a mean.
        min_scale: where the scale stops.
    """
    if not 0 < factor < 1 or not 0 <= rtol <= 1 or atol < 0 or rtol + atol == 0:
        raise ValueError(
            "expected 0 < factor < 1, 0 <= rtol <= 1, atol >= 0, one of both above 0, got factor "
            f"{factor}, rtol {rtol}, atol {atol}"
        )

    def init(params: Tree) -> ReduceLROnPlateauState:
        # In the state, since `observe` is given nothing else
        given = factor, patience, rtol, atol, cooldown, accumulation_size, min_scale
        rules = PlateauRules(*map(number, given))
        return ReduceLROnPlateauState(
            scale=number(1.0),
            best_value=number(math.inf),  # so any first mean is better
            plateau_count=step_count(),
            cooldown_count=step_count(),
            count=step_count(),
            avg_value=number(0.0),
            rules=rules,
        )

    def update(
        updates: Tree, state: ReduceLROnPlateauState, params: Tree
    ) -> tuple[Tree, ReduceLROnPlateauState]:
        # The state changes between steps only, by `observe`
        return elementwise(lambda u: u * state.scale, updates), state

    return pointwise(init, update)


def observe(state: Any, value: float | Tensor) -> Any:
    """A state in which every `reduce_on_plateau` has seen one more value of the metric.

    Call it on every rank with the same value, which a step's metrics are; nothing is communicated.

    Raises:
        ValueError: the state holds no reduce_on_plateau.
    """
    if not find_states(as_local(state), ReduceLROnPlateauState):
        raise ValueError(
            "expected a reduce_on_plateau in this state, got none. Remedy: chain one after the "
            "optimizer"
        )
    # On the CPU, like the state; this is where the host waits for the metric
    seen = number(value.detach() if isinstance(value, Tensor) else value)
    return replace_states(state, ReduceLROnPlateauState, lambda old: _observe(old, seen))


def _observe(state: ReduceLROnPlateauState, value: Tensor) -> ReduceLROnPlateauState:
    count = state.count + 1
    # A running mean: the sum of many values would lose digits
    mean = state.avg_value + (value - state.avg_value) / count
    gathered = state._replace(count=count, avg_value=mean)
    # On the CPU, all of it
    return _judge(gathered) if count >= state.rules.accumulation_size else gathered


def _judge(state: ReduceLROnPlateauState) -> ReduceLROnPlateauState:
    """The state after one more mean, which is full."""
    rules = state.rules
    # Less than the best by both tolerances together
    better = state.avg_value < (1 - rules.rtol) * state.best_value - rules.atol
    plateau = torch.where(better, 0, state.plateau_count + 1)
    # A mean while cooling is no plateau, but may be the best
    cooling = state.cooldown_count > 0
    falls = (plateau >= rules.patience) & ~cooling
    fallen = torch.maximum(state.scale * rules.factor, rules.min_scale)
    # A fall starts the cooldown again; any other mean brings its end nearer
    one_less = (state.cooldown_count - 1).clamp(min=0)
    scale = torch.where(falls, fallen, state.scale)
    best_value = torch.where(better, state.avg_value, state.best_value)
    plateau_count = torch.where(falls | cooling, 0, plateau)
    cooldown_count = torch.where(falls, rules.cooldown.long(), one_less)
    return ReduceLROnPlateauState(
        scale=scale,
        best_value=best_value,
        plateau_count=plateau_count,
        cooldown_count=cooldown_count,
        count=torch.zeros_like(state.count),  # the next mean begins
        avg_value=torch.zeros_like(state.avg_value),
        rules=rules,
    )
