"""Names and hyperparameters: how a transform prints, and which transforms compare equal."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.optim import Transform
from functorch_zero.optim.naming import NamedFunction, described
from tests.conformance.table import TABLE
from tests.tiers import THOROUGH

FACTOR = 2.0  # which a transform below looks up


def scaled(update: Any) -> Transform:
    return optim.pointwise(lambda params: (), update)


@optim.named
def scale_twice(by: float, *more: float, start: int = 0, **options: float) -> Transform:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u * by, updates), state

    return scaled(update)


@optim.named
def falling(first: float, count_to: int = 10) -> optim.Schedule:
    return lambda count: first * (1 - count / count_to)


def test_a_transform_prints_as_the_call_that_made_it() -> None:
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-3))
    assert repr(clipped) == (
        "chain(clip_by_global_norm(max_norm=1.0), adam(learning_rate=0.001, b1=0.9, b2=0.999, "
        "eps=1e-08, eps_root=0.0, weight_decay=0.0))"
    )
    assert repr(scale_twice(2.0, 3.0, 4.0, other=5.0)) == (
        "scale_twice(2.0, 3.0, 4.0, start=0, other=5.0)"
    )
    assert repr(optim.scale_by_schedule(falling(0.5))) == (
        "scale_by_schedule(step_size_fn=falling(first=0.5, count_to=10))"
    )
    assert repr(optim.masked(optim.scale(torch.tensor(2.0)), {"w": True})) == (
        "masked(inner=scale(step_size=2.0), mask={'w': True})"
    )
    own = scaled(lambda updates, state, params: (updates, state))
    assert repr(own).startswith("pointwise(init=scaled.<locals>.<lambda>, update=test_a_transform")
    assert repr(Transform(own.init, own.update, own.needs)) == "transform()"


def test_a_factory_stays_a_function() -> None:
    assert inspect.isfunction(optim.adamw) and optim.adamw.__name__ == "adamw"
    assert list(inspect.signature(optim.adamw).parameters)[:2] == ["learning_rate", "b1"]
    assert optim.adamw.__doc__ is not None and "Loshchilov" in optim.adamw.__doc__
    assert isinstance(falling(1.0), NamedFunction) and falling(1.0)(5) == 0.5
    assert list(inspect.signature(falling(1.0)).parameters) == ["count"]
    with pytest.raises(TypeError, match=r"returned a int, expected a transform.*Remedy"):
        optim.named(lambda: 3)()


def test_named_schedules_can_be_copied() -> None:
    copied = copy.deepcopy(falling(1.0))
    assert copied(5) == 0.5 and repr(copied) == repr(falling(1.0))


def test_names_of_others_are_qualified() -> None:
    assert optim.adamw(0.1).name == "adamw"
    assert scale_twice(1.0).name == f"{__name__}.scale_twice"


ALIKE: dict[str, Callable[[], Any]] = {name: row.make for name, row in TABLE.items()}


@pytest.mark.parametrize("name", ALIKE)
def test_descriptions_are_plain_data_and_equal_for_equal_transforms(name: str) -> None:
    first, second = described(ALIKE[name]()), described(ALIKE[name]())
    assert json.loads(json.dumps(first, allow_nan=False)) == first == second
    assert " at 0x" not in repr(ALIKE[name]())


def own(number: float) -> Transform:
    return scaled(lambda updates, state, params: (tree_map(lambda u: u * number, updates), state))


def with_default(number: float) -> Transform:
    def update(updates: Any, state: Any, params: Any, *, factor: float = number) -> Any:
        return tree_map(lambda u: u * factor, updates), state

    return scaled(update)


def bound_method(number: float) -> Transform:
    class Author:
        def __init__(self) -> None:
            self.number = number

        def update(self, updates: Any, state: Any, params: Any) -> Any:
            return updates, state

    return scaled(Author().update)


def by_partial(number: float) -> Transform:
    def update(updates: Any, state: Any, params: Any, factor: float) -> Any:
        return updates, state

    return scaled(functools.partial(update, factor=number))


def global_number(number: float) -> Transform:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u * FACTOR, updates), state

    namespace = {**globals(), "FACTOR": number}
    return scaled(type(update)(update.__code__, namespace, "update"))


def variables_of_our_names(number: float) -> Transform:
    """Closed over variables that are called as the description's own parts."""
    defaults, literals, code = number, number + 1, number + 2

    def update(updates: Any, state: Any, params: Any, by: float = 2.0) -> Any:
        return tree_map(lambda u: u * by * defaults, updates), literals * code

    return scaled(update)


@optim.named
def with_a_factory(factory: float) -> Transform:
    return optim.scale(factory)


class TwiceSlotted:
    """Two slots of one name, as its classes write it."""

    __slots__ = ("__rate",)

    def __init__(self, rate: float) -> None:
        self.__rate = rate


class Derived(TwiceSlotted):
    __slots__ = ("__rate",)

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.__rate = 1.0


def literal(number: float) -> Transform:
    code = f"lambda updates, state, params: (tree_map(lambda u: u * {number}, updates), state)"
    return scaled(eval(code, globals()))


def directly(number: float) -> Transform:
    inner = own(number)
    return Transform(inner.init, inner.update, inner.needs, parts=(inner,))


DIFFERENT: dict[str, Callable[[float], Any]] = {
    "an argument": lambda x: optim.scale(x),
    "a default": lambda x: optim.adamw(1.0) if x == 1.5 else optim.adamw(1.0, b1=0.8),
    "a part": lambda x: optim.chain(optim.clip(1.0), optim.scale(x)),
    "a schedule": lambda x: optim.sgd(optim.linear_schedule(1.0, x, 10)),
    "a schedule of one's own": lambda x: optim.sgd(lambda count: x / (count + 1)),
    "a named schedule": lambda x: optim.sgd(falling(x)),
    "a mask": lambda x: optim.adamw(1.0, mask=lambda path, leaf: leaf.numel() > x),
    "a mask of values": lambda x: optim.masked(optim.scale(1.0), {"a": x == 1.5}),
    "large tensors": lambda x: optim.masked(optim.scale(1.0), {"a": torch.arange(20.0).add(x)}),
    "a factory": lambda x: optim.inject_hyperparams(lambda b: optim.scale(b * x))(0.1),
    "an injected argument": lambda x: optim.inject_hyperparams(optim.sgd)(x),
    "a keyword": lambda x: scale_twice(1.0, other=x),
    "a further argument": lambda x: scale_twice(1.0, x),
    "a closure": own,
    "the default of an update": with_default,
    "an attribute": bound_method,
    "a partial": by_partial,
    "a global": global_number,
    "a literal": literal,
    "variables of our names": variables_of_our_names,
    "an argument called factory": with_a_factory,
    "slots of one name": lambda x: scaled(functools.partial(own(1.0).update, Derived(x))),
    "keys that print alike": lambda x: scaled(functools.partial(own(1.0).update, {1: x, "1": 0.0})),
    "a Transform made directly": directly,
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_numbers_are_told_apart(what: str) -> None:
    make = DIFFERENT[what]
    assert described(make(1.5)) == described(make(1.5))
    assert described(make(1.5)) != described(make(2.5))


TABLE_OF_RATES = np.linspace(0.1, 0.0, 40).reshape(4, 10)
LARGE = torch.linspace(0.1, 0.0, 40)
SETTINGS = {"stages": [{"rates": [0.1, 0.2]}]}


def config(rate: float, rank: int = 0) -> ModuleType:
    module = ModuleType("a_users_config")
    module.rates, module.rank = [rate, 0.0], rank  # type: ignore[attr-defined]
    return module


CONFIG = config(0.1)


class Slots:
    __slots__ = ("__private", "peak")

    def __init__(self, peak: float) -> None:
        self.peak, self.__private = 1.0, peak

    def __call__(self, count: Tensor) -> Any:
        return self.peak * self.__private / (count + 1)


class MoreSlots(Slots):
    __slots__ = ("rate",)


class Arguments:
    """As argparse makes them: a rank's own among them."""

    def __init__(self, rate: float, rank: int = 0) -> None:
        self.rate, self.rank = rate, rank


ARGUMENTS = Arguments(0.1)
BY_AN_OBJECT = Slots(0.1)


def decay(count: Any) -> Any:
    return 0.1 / (count + 1)


def helper(count: Any) -> Any:
    return decay(count) * helper(count - 1) if count > 0 else decay(count)


def from_source(source: str, **namespace: Any) -> Any:
    return eval(source, {**globals(), **namespace})


def with_globals(function: Any, **namespace: Any) -> Any:
    """The same function, which finds these under its global names."""
    new = {**function.__globals__, **namespace}
    return type(function)(function.__code__, new, function.__name__)


@optim.named
def named_by_a_user(rate: float) -> optim.Schedule:
    return lambda count: rate / (count + 1)


def other_code(factory: Any) -> Any:
    """The same factory by name, with other code."""

    @functools.wraps(inspect.unwrap(factory))
    def other(rate: float) -> optim.Schedule:
        return lambda count: rate / (count + 2)

    del other.__wrapped__
    return optim.named(other)


# Two schedules that differ as ranks' may
SCHEDULES: dict[str, tuple[Any, Any]] = {
    "an operator": (lambda n: 0.1 * n, lambda n: 0.1 + n),
    "a function of torch": (lambda n: torch.cos(n), lambda n: torch.sin(n)),
    "a text": (from_source("lambda n: {'a': 1}['a']"), from_source("lambda n: {'b': 1}['b']")),
    "code inside": (lambda n: (lambda: n + n)(), lambda n: (lambda: n * n)()),
    "a closed-over table": tuple(
        (lambda table: lambda n: table[n])(TABLE_OF_RATES * x) for x in (1, 2)
    ),
    "a global table": tuple(
        with_globals(lambda n: TABLE_OF_RATES[n], TABLE_OF_RATES=TABLE_OF_RATES * x) for x in (1, 2)
    ),
    "a global large tensor": tuple(
        with_globals(lambda n: LARGE[n], LARGE=LARGE * x) for x in (1, 2)
    ),
    "a closed-over large tensor": tuple((lambda t: lambda n: t[n])(LARGE * x) for x in (1, 2)),
    "the last element": tuple(
        (lambda t: lambda n: t[n])(torch.cat([LARGE, torch.tensor([x])])) for x in (1.0, 2.0)
    ),
    "slots": (Slots(0.1), Slots(0.2)),
    "inherited slots": (MoreSlots(0.1), MoreSlots(0.2)),
    "closed-over slots": tuple((lambda s: lambda n: s(n))(Slots(x)) for x in (0.1, 0.2)),
    "a global object": tuple(
        with_globals(lambda n: BY_AN_OBJECT(n), BY_AN_OBJECT=Slots(x)) for x in (0.1, 0.2)
    ),
    "an attribute of a global": tuple(
        with_globals(lambda n: ARGUMENTS.rate * n, ARGUMENTS=Arguments(x)) for x in (0.1, 0.2)
    ),
    "an attribute of a module": tuple(
        with_globals(lambda n: CONFIG.rates[n], CONFIG=config(x)) for x in (0.1, 0.2)
    ),
    "a global list": tuple(
        with_globals(
            lambda n: SETTINGS["stages"][0]["rates"][n], SETTINGS={"stages": [{"rates": [x, 0]}]}
        )
        for x in (0.1, 0.2)
    ),
    "a global function": tuple(
        with_globals(lambda n: decay(n), decay=by)
        for by in (decay, lambda count: 0.1 / (count + 2))
    ),
    "a function that it calls calls": tuple(
        with_globals(lambda n: helper(n), helper=with_globals(helper, decay=by))
        for by in (decay, lambda count: 0.1 / (count + 2))
    ),
    "a global partial": tuple(
        with_globals(lambda n: decay(n), decay=functools.partial(pow, x)) for x in (0.1, 0.2)
    ),
    "a global named one": tuple(with_globals(lambda n: decay(n), decay=falling(x)) for x in (1, 2)),
    "a named factory's code": (named_by_a_user(0.1), other_code(named_by_a_user)(0.1)),
    "a class's code": tuple(
        type("Schedule", (), {"__call__": call, "__module__": __name__})()
        for call in (lambda self, n: n, lambda self, n: n + n)
    ),
}


@pytest.mark.parametrize("what", SCHEDULES)
def test_schedules_that_differ_are_told_apart(what: str) -> None:
    first, second = SCHEDULES[what]
    assert described(optim.sgd(first)) == described(optim.sgd(first))
    assert described(optim.sgd(first)) != described(optim.sgd(second))
    json.dumps(described(optim.sgd(first)), allow_nan=False)


def test_attributes_that_no_schedule_names_may_differ() -> None:
    """A rank's number lies beside the learning rate, in arguments or a module."""

    def schedule(count: Any) -> Any:
        return ARGUMENTS.rate * CONFIG.rates[0]

    mine, others = (
        with_globals(schedule, ARGUMENTS=Arguments(0.1, rank), CONFIG=config(0.1, rank))
        for rank in (0, 1)
    )
    assert described(optim.sgd(mine)) == described(optim.sgd(others))


@THOROUGH
def test_code_is_the_same_in_another_process() -> None:
    """Whatever the order of sets there."""
    source = "lambda n: 0.1 if n in {'a', 'b', 'c', 'd', 'e', 'f', 'g'} else 0.2"
    code = f"from functorch_zero.optim.naming import described\nprint(described({source}))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    (here,) = described(from_source(source)).values()
    assert here["(code)"] in run.stdout


def test_functions_that_call_each_other_are_described_once() -> None:
    namespace: dict[str, Any] = {"f0": decay}
    for k in range(1, 40):  # each calls the one before twice
        namespace[f"f{k}"] = from_source(f"lambda n: f{k - 1}(n) + f{k - 1}(n - 1)")
        namespace[f"f{k}"].__globals__.update(namespace)
    shown = json.dumps(described(namespace["f10"]))
    assert len(shown) < 10_000
    assert "decay" in shown


def test_defaults_are_hyperparameters() -> None:
    assert described(optim.adamw(1e-3)) == described(optim.adamw(learning_rate=1e-3, b1=0.9))


def test_infinities_are_json() -> None:
    shown = described(optim.nan_to_num(posinf=math.inf))
    assert shown == {"nan_to_num": {"nan": 0.0, "posinf": "inf", "neginf": None}}


def test_ranks_may_have_devices_of_their_own() -> None:
    assert described(torch.device("cuda", 0)) == described(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({1, 2}, {1, 3}),
        (1 + 2j, 1 + 3j),
        (np.arange(3), np.arange(1, 4)),
        (np.arange(40.0), np.arange(1.0, 41.0)),
    ],
)
def test_values_of_any_kind_differ(a: Any, b: Any) -> None:
    assert described(a) != described(b) and described(a) == described(copy.deepcopy(a))


def test_a_transform_equals_itself_alone() -> None:
    """Their names and numbers may be equal, and their functions are not: steps find plans by it."""
    for factory in (optim.adamw, optim.scale_by_learning_rate):
        one, other = factory(0.1), factory(0.1)
        assert one == one and one != other and len({one, other}) == 2
