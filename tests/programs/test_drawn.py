"""Programs that are drawn: one or two networks, one to three gradients of some of them, with
micro-batches and buffers, and optimizers, levels and ranks of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero.step.program_step import ProgramStep
from functorch_zero.testing import assert_sharded_equals_unsharded, strategies
from functorch_zero.testing.models import Batch, Case
from functorch_zero.testing.strategies import NamedOptimizer
from tests.tiers import drawn

# BatchNorm couples the rows of a rank, which no program can be compared with
KINDS = ["mlp", "frozen_mlp", "gpt", "shared", "unused", "scalars", "mixed"]


class Net(NamedTuple):
    """A network of a program."""

    case: Case
    frozen: tuple[str, ...]  # paths of leaves beside those that the case freezes
    optimizer: NamedOptimizer

    def params(self) -> Any:
        _, params, _ = self.case.step(self.optimizer.make())
        for path in self.frozen:
            params[path] = params[path].detach()
        return params


class Gradient(NamedTuple):
    """A gradient that a program takes, and its use."""

    of: tuple[str, ...]  # names of nets, in this order
    use: Literal["optimizer", "descent", "displaced", "noise"]


@dataclass(frozen=True)
class Drawn:
    """A program, its batches and its ranks."""

    nets: dict[str, Net]
    gradients: tuple[Gradient, ...]
    averages: bool  # whether the loss reads an average of the first net
    weighted: bool
    accumulate: int | None  # micro-batches; None: the batch is passed by its place
    has_buffers: bool
    donate: bool
    level: Any
    ranks: int
    rows: int

    def step(self) -> ProgramStep:
        optimizers = {name: net.optimizer.make() for name, net in self.nets.items()}
        applies = {}
        for name, net in self.nets.items():
            applies[name] = fz.functionalize(net.case.module(), units=net.case.units)[0]

        def init(one: Any, two: Any) -> Value:
            nets = {"one": one} if two is None else {"one": one, "two": two}
            opts = {name: optimizers[name].init(params) for name, params in nets.items()}
            buffers = {"seen": torch.zeros((), dtype=torch.float64), "count": torch.tensor(0)}
            return Value(nets, tree_map(torch.clone, one), opts, buffers, 0)

        def loss(differentiated: Any, read: Any, mean: Any, batch: Any, buffers: Any = None) -> Any:
            trees = {**differentiated, **read}
            total, outputs = torch.zeros((), dtype=torch.float64), []
            for name, net in self.nets.items():
                output, _ = applies[name](trees[name], {}, batch[name]["x"])
                total = total + net.case.criterion(output, batch[name]).double()
                outputs.append(output.double().flatten(1).mean(1))  # (rows,)
            if self.averages:
                output, _ = applies["one"](mean, {}, batch["one"]["x"])
                outputs.append(output.double().flatten(1).mean(1))
            # Row by row each output times the next one, so that gradients depend on all trees
            for before, after in pairwise(outputs):
                total = total + (before * after).mean()
            weight = len(batch["one"]["x"]) if self.weighted else None
            if buffers is not None:
                # Of parts of unequal size, the mean of means would be another one
                seen = 1.0 if self.weighted else batch["one"]["x"].double().mean()
                buffers = {"seen": buffers["seen"] + seen, "count": buffers["count"] + 1}
            metrics = {"first": outputs[0].mean()}
            return total, fz.Aux(metrics=metrics, weight=weight, buffers=buffers)

        def gradient_of(trees: tuple[Any, ...], batch: Any, buffers: Any) -> Any:
            """The value, its metrics, the next buffers and the gradients."""
            named = {"buffers": buffers} if self.has_buffers else {}
            if self.accumulate is None:
                found, grads = fz.value_and_grad(loss)(*trees, batch, **named)
            else:
                of_loss = fz.value_and_grad(loss, accumulate=self.accumulate)
                found, grads = of_loss(*trees, batch=batch, **named)
            value, metrics, *new = found
            return value, metrics, new[0] if new else buffers, grads

        def program(value: Value, batch: Any) -> Any:
            nets, opts, metrics = dict(value.nets), dict(value.opts), {}
            buffers = value.buffers
            at = dict(nets)  # where the next gradient is taken
            for k, gradient in enumerate(self.gradients):
                differentiated = {name: at[name] for name in gradient.of}
                read = {name: tree for name, tree in at.items() if name not in gradient.of}
                trees = differentiated, read, value.mean
                found, seen, buffers, grads = gradient_of(trees, batch, buffers)
                metrics[f"loss{k}"] = found
                metrics[f"first{k}"] = seen["first"]
                for name in gradient.of:
                    grad, params = grads[name], nets[name]
                    metrics[f"norm{k} of {name}"] = fz.dot(grad, grad).sqrt()
                    if gradient.use == "optimizer":
                        nets[name], opts[name] = optimizers[name].apply(grad, opts[name], params)
                    elif gradient.use == "descent":
                        nets[name] = fz.apply_updates(params, tree_map(lambda g: -0.02 * g, grad))
                    elif gradient.use == "noise":
                        noise = tree_map(lambda x: 0.01 * x, fz.random.normal(grad))
                        nets[name] = fz.apply_updates(params, noise)
                    at[name] = nets[name]
                    if gradient.use == "displaced":
                        away = tree_map(lambda g: 0.02 * g, grad)
                        at[name] = fz.apply_updates(params, away)
            # Of a frozen leaf it is the leaf, to the bit
            mean = tree_map(lambda m, p: m + 0.1 * (p - m), value.mean, nets["one"])
            return Value(nets, mean, opts, buffers, value.num_steps + 1), metrics

        return fz.program_step(program, init=init)

    def batches(self) -> list[dict[str, Batch]]:
        by_net = {name: net.case.batches(2, self.rows) for name, net in self.nets.items()}
        return [{name: made[k] for name, made in by_net.items()} for k in range(2)]

    def unused(self) -> list[str]:
        """Patterns of the paths of leaves in the value that no loss uses."""
        return [
            f"nets.{name}.{path}" for name, net in self.nets.items() for path in net.case.unused
        ]


class Value(NamedTuple):
    nets: dict[str, Any]
    mean: Any  # of the first net
    opts: dict[str, Any]
    buffers: dict[str, Tensor]
    num_steps: int


@st.composite
def nets(draw: st.DrawFn) -> Net:
    case = draw(strategies.modules(KINDS))
    optimizer = draw(strategies.optimizers())
    params = Net(case, (), optimizer).params()
    trained = [path for path, leaf in params.items() if leaf.requires_grad]
    # One that a loss uses and that has elements stays trained
    used = [path for path in trained if params[path].numel() and not _is_unused(case, path)]
    kept = draw(st.sampled_from(used))
    others = [path for path in trained if path != kept]
    frozen = draw(st.one_of(st.just([]), st.lists(st.sampled_from(others), unique=True)))
    return Net(case, tuple(frozen), optimizer)


def _is_unused(case: Case, path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in case.unused)


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    names = draw(st.sampled_from([("one",), ("one", "two")]))
    some = st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple)
    uses = st.sampled_from(["optimizer", "descent", "displaced", "noise"])
    gradients = draw(st.lists(st.builds(Gradient, some, uses), max_size=2))
    # The last one moves all of them
    order = draw(st.permutations(names))
    gradients.append(Gradient(tuple(order), draw(st.sampled_from(["optimizer", "descent"]))))
    ranks, weighted = draw(strategies.world_sizes(3)), draw(st.booleans())
    one_level = st.sampled_from([0, 1, 2, 3])
    by_tree = st.fixed_dictionaries({name: one_level for name in names})
    accumulate = draw(st.sampled_from([None, 1, 2]))
    fewest = ranks * (accumulate or 1)
    return Drawn(
        nets={name: draw(nets()) for name in names},
        gradients=tuple(gradients),
        averages=draw(st.booleans()),
        weighted=weighted,
        accumulate=accumulate,
        has_buffers=draw(st.booleans()),
        donate=draw(st.booleans()),
        level=draw(st.one_of(one_level, by_tree)),
        ranks=ranks,
        rows=draw(st.integers(fewest, 3 * ranks + 1)) if weighted else 2 * ranks,
    )


@drawn(programs(), quick=1, thorough=30, full=200)
def test_programs(program: Drawn) -> None:
    trees: list[Any] = [net.params() for net in program.nets.values()]
    assert_sharded_equals_unsharded(
        program.step(),
        *trees,
        *[None] * (2 - len(trees)),
        program.batches(),
        levels=[program.level],
        ranks=[program.ranks],
        unused=program.unused(),
        donate=program.donate,
    )
