"""The same case by the package: unsharded, and as one rank of the sharded step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from optree import tree_leaves, tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint
from functorch_zero.groups.protocol import Group
from functorch_zero.model.functionalize import Apply
from functorch_zero.step.evaluate import EvalStep
from functorch_zero.step.loss import Outcome
from functorch_zero.step.program import PART, Part
from functorch_zero.step.train import TrainStep
from tests.fuzz import optimizers
from tests.fuzz.cases import Case
from tests.fuzz.losses import LOSSES, Batch, squared_error
from tests.fuzz.models import Block, make
from tests.fuzz.runs import Named, Seen, copied, mean_of_named, synchronized

LEVELS: dict[int | str, Any] = {
    "mixed": {"": 3, "blocks": 1, "blocks.0.linear": 2, "out": 0},
    "by dims": lambda path, leaf: 3 if leaf.ndim >= 2 else 1,
}
UNITS: dict[str, Any] = {
    "children": None,
    "blocks": Block,
    "linears": nn.Linear,
    "pattern": ["blocks.*", "out"],
    "nested": lambda path, module: isinstance(module, Block | nn.Linear),
}
PRECISIONS = {
    "none": None,
    "compute float32": fz.Precision(
        compute=torch.float32, buffers=torch.float32, output=torch.float64
    ),
    "gather float32": fz.Precision(gather=torch.float32),
    "reduce float32": fz.Precision(reduce=torch.float32),
}


class PureModel:
    """An `apply` with its leaves, as losses see it."""

    def __init__(self, apply: Apply, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]):
        self.apply, self.leaves, self.buffers = apply, params, buffers

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor
        output, self.buffers = self.apply(self.leaves, self.buffers, x)
        return output


class Parts:
    """What a case gives to the package."""

    def __init__(self, case: Case):
        self.case = case
        module = make(case.blocks, getattr(torch, case.dtype), case.seed)
        self.apply, self.params, self.buffers = fz.functionalize(
            module,
            UNITS[case.units],
            remat=case.remat,
            precision=PRECISIONS[case.precision],
        )

    @cached_property
    def step(self) -> TrainStep:
        case = self.case
        return fz.train_step(
            self._loss,
            optimizers.ours(case.optimizer),
            trainable=optimizers.is_matrix if case.trainable == "matrices" else None,
            accumulate=case.accumulate,
            nonfinite=None if case.nonfinite == "pass" else case.nonfinite,  # type: ignore[arg-type]
            loss_scale=fz.LossScale(initial=8.0) if case.loss_scale else None,
        )

    @cached_property
    def evaluation(self) -> EvalStep:
        return fz.eval_step(self._evaluate)

    def _loss(self, params: Any, buffers: Any, batch: Batch) -> Any:
        model = PureModel(self.apply, params, buffers)
        result = LOSSES[self.case.loss](model, batch)
        weight = self.case.weight(batch)
        if not result.keeps_buffers and weight is None:
            return result.loss
        kept = model.buffers if result.keeps_buffers else None
        return result.loss, fz.Aux(buffers=kept, metrics=result.metrics, weight=weight)

    def _evaluate(self, params: Any, buffers: Any, batch: Batch) -> fz.Aux:
        error = squared_error(PureModel(self.apply, params, buffers), batch)
        return fz.Aux(metrics={"evaluated": error}, weight=len(batch["x"]))


@torch.no_grad()
def handled(state: fz.State, how: str) -> fz.State:
    """The state after a user's work on its leaves, whole ones or this rank's pieces."""
    match how:
        case "shrink":
            smaller = tree_map(lambda p: (0.9 * p).requires_grad_(p.requires_grad), state.params)
            return state.replace(params=smaller)
        case "shrink in place":
            for leaf in tree_leaves(state.params):
                leaf.mul_(0.9)
        case "set step":
            return state.replace(step=state.step + 5)
    return state


@torch.no_grad()
def normalised(whole: fz.State) -> fz.State:
    """The same, by all elements of each leaf."""

    def divide(leaf: Tensor) -> Tensor:
        return (leaf / (1 + leaf.abs().sum())).requires_grad_(leaf.requires_grad)

    return whole.replace(params=tree_map(divide, whole.params))


def opt_state_of(state: fz.State) -> Named:
    found = fz.named_leaves(state.opt_state)
    return copied({path: leaf for path, leaf in found.items() if isinstance(leaf, Tensor)})


class Unsharded:
    """The step for one process: on whole batches, or, where parts give other results, on the ranks'
    parts one by one."""

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder, self.given = case, folder, Parts(case)
        self.state = self.given.step.init(self.given.params, self.given.buffers)
        num_parts = case.ranks if case.coupled else 1
        self.buffers = [self.state.buffers] * num_parts

    def step(self, parts: list[Batch]) -> Named:
        before, values = self.state, copied(self.state.params)
        if self.case.coupled:
            metrics = self._step_in_parts(parts)
        else:
            self.state, metrics = self.given.step(self.state, joined(parts))
            self.buffers = [self.state.buffers]
        for name, leaf in values.items():
            same = torch.equal(before.params[name], leaf)
            assert same, f"the unsharded step changed {name} of the state that it was given"
        return metrics

    def _step_in_parts(self, parts: list[Batch]) -> Named:
        found: list[Any] = []

        def alone(grads: Any, outcome: Outcome) -> tuple[Any, Outcome]:
            found.append((grads, outcome))
            return grads, outcome

        for rank, part in enumerate(parts):
            self._step_of(rank, part, alone)
        outcomes = [outcome for _, outcome in found]
        weights = [1.0 if o.weight is None else float(o.weight) for o in outcomes]
        metrics = mean_of_named([tensors({"loss": o.loss, **o.metrics}) for o in outcomes], weights)
        counts = [weight > 0 for weight in weights]
        new = synchronized(self.case.sync_buffers, [dict(o.buffers) for o in outcomes], counts)
        total = sum(weights)
        mean = tree_map(
            lambda *gs: sum(g * (w / total) for g, w in zip(gs, weights, strict=True)),
            *(grads for grads, _ in found),
        )
        loss = metrics.pop("loss")

        def together(grads: Any, outcome: Outcome) -> tuple[Any, Outcome]:
            return mean, Outcome(loss, new[0], metrics, None)

        skipped = self.state.finite and int(self.state.finite.skipped)
        self.state, measured = self._step_of(0, parts[0], together)
        if self.state.finite is None or int(self.state.finite.skipped) == skipped:
            self.buffers = new
        return measured

    def _step_of(self, rank: int, part: Batch, mean: Any) -> tuple[fz.State, Named]:
        """A rank's step on its part of the batch, with another mean over ranks."""
        token = PART.set(Part(rank, mean))
        try:
            return self.given.step(self.state.replace(buffers=self.buffers[rank]), part)
        finally:
            PART.reset(token)

    def between(self, parts: list[Batch]) -> Named:
        step, state, how = self.given.step, self.state, self.case.between
        match how:
            case "whole leaves":
                self.state = normalised(state)
            case "init again":
                self.state = step.init(state.params, state.buffers)
            case "checkpoint":
                checkpoint.save(self.folder, step, state)
                self.state, _ = checkpoint.load(self.folder, step, like=self._blank())
            case "evaluate":
                return self._evaluate(parts)
            case _:
                self.state = handled(state, how)
        return {}

    def _blank(self) -> fz.State:
        return self.given.step.init(self.given.params, self.given.buffers)

    def _evaluate(self, parts: list[Batch]) -> Named:
        if not self.case.coupled:
            return self.given.evaluation(self.state, joined(parts))
        metrics, weights = [], []
        for held, part in zip(self.buffers, parts, strict=True):
            metrics.append(self.given.evaluation(self.state.replace(buffers=held), part))
            weights.append(float(len(part["x"])))
        return mean_of_named(metrics, weights)

    def seen(self, metrics: Named) -> Seen:
        buffers = [copied(held) for held in self.buffers]
        return Seen(copied(self.state.params), buffers, tensors(metrics), opt_state_of(self.state))


class Sharded:
    """One rank of the sharded step."""

    def __init__(self, case: Case, folder: Path, group: Group):
        self.case, self.folder, self.given = case, folder, Parts(case)
        self.group: Group = fz.HybridGroup(group, shard_size=2) if case.mesh else group
        self.sharded = self._shard(case.level)
        self.state = self._first()

    def _shard(self, level: int | str) -> Any:
        return fz.shard(self.given.step, **self._options(level))

    def _options(self, level: int | str) -> dict[str, Any]:
        case = self.case
        return {
            "level": LEVELS.get(level, level),
            "group": self.group,
            "donate": case.donate,
            "sync_buffers": case.sync_buffers,
            "reshard_after_forward": case.reshard,
            "reduce_gradients": case.reduce_gradients,
            "overlap": case.overlap,
            "reduce_bucket": None if level == 3 else case.reduce_bucket,
        }

    def _first(self) -> fz.State:
        state: fz.State = self.sharded.init(self.given.params, self.given.buffers)
        return state

    def step(self, parts: list[Batch]) -> Named:
        batch = parts[self.group.rank]
        if self.case.between == "twice":
            self.sharded(self.state, batch)  # forgotten: the state given stays as it is
        self.state, metrics = self.sharded(self.state, batch)
        found: Named = metrics
        return found

    def between(self, parts: list[Batch]) -> Named:
        state, how = self.state, self.case.between
        match how:
            case "relevel":
                whole = self.sharded.unshard(state)
                self.sharded = self._shard(0 if self.case.level == 3 else 3)
                self.state = self.sharded.shard(whole)
            case "whole leaves":
                whole = self.sharded.unshard(state)
                self.state = self.sharded.shard(normalised(whole))
            case "init again":
                whole = self.sharded.unshard(state)
                self.state = self.sharded.init(whole.params, whole.buffers)
            case "checkpoint":
                checkpoint.save(self.folder, self.sharded, state)
                self.state, _ = checkpoint.load(self.folder, self.sharded, like=self._first())
            case "evaluate":
                evaluation = fz.shard(self.given.evaluation, **self._options(self.case.level))
                metrics: Named = evaluation(state, parts[self.group.rank])
                return metrics
            case _:
                self.state = handled(state, how)
        return {}

    def seen(self, metrics: Named) -> Seen:
        whole = self.sharded.unshard(self.state)
        return Seen(
            copied(whole.params), [copied(whole.buffers)], tensors(metrics), opt_state_of(whole)
        )


def joined(parts: list[Batch]) -> Batch:
    """The whole batch."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def tensors(metrics: Mapping[str, Tensor | float]) -> Named:
    return {name: torch.as_tensor(value).detach() for name, value in metrics.items()}
