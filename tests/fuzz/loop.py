"""The plain torch loop: nn.Module, `loss.backward()` and an optimizer. It shares nothing with the
package."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.fuzz import optimizers
from tests.fuzz.cases import Case
from tests.fuzz.losses import LOSSES, Batch, squared_error
from tests.fuzz.models import default_dtype, make
from tests.fuzz.runs import Named, Seen, copied, in_micro_batches, mean_of_named, synchronized


class PlainModel:
    """A module as losses see it."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.leaves = dict(module.named_parameters())

    @property
    def buffers(self) -> Named:
        return dict(self.module.named_buffers())

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)
        return output


class Found(NamedTuple):
    """The results of one backward."""

    weight: float
    metrics: Named
    grads: Named


class Loop:
    """A case as a loop over the ranks' parts of each batch, one after the other."""

    def __init__(self, case: Case):
        self.case = case
        self.module = make(case.blocks, getattr(torch, case.dtype), case.seed)
        if case.trainable == "matrices":
            for leaf in self.module.parameters():
                leaf.requires_grad_(leaf.ndim >= 2)
        self.model = PlainModel(self.module)
        trained = [leaf for leaf in self.module.parameters() if leaf.requires_grad]
        self.trained = trained
        self.optimizer = optimizers.torchs(case.optimizer, trained)
        self.buffers = [copied(self.model.buffers)] * case.ranks  # by rank

    def step(self, parts: list[Batch]) -> Named:
        found, buffers = [], []
        for held, part in zip(self.buffers, parts, strict=True):
            self._set_buffers(held)
            for micro in in_micro_batches(part, self.case.accumulate):
                found.append(self._differentiate(micro))
            buffers.append(copied(self.model.buffers))
        weights = [one.weight for one in found]
        grads = mean_of_named([one.grads for one in found], weights)
        metrics = mean_of_named([one.metrics for one in found], weights)
        if self._skips(metrics["loss"], grads):
            return metrics
        self._update(grads)
        counts = [len(part["x"]) > 0 for part in parts]
        self.buffers = synchronized(self.case.sync_buffers, buffers, counts)
        return metrics

    def _differentiate(self, batch: Batch) -> Found:
        """The loss and its gradients on one part; the module's buffers go on, if it has rows."""
        before = copied(self.model.buffers)
        result = LOSSES[self.case.loss](self.model, batch)
        after = copied(self.model.buffers)  # a checkpoint runs the model again, in backward
        self.module.zero_grad()  # of a backward inside the loss
        result.loss.backward()
        weight = self.case.weight(batch)
        self._set_buffers(after if result.keeps_buffers and weight != 0 else before)
        metrics = {"loss": result.loss.detach()}
        for name, value in result.metrics.items():
            metrics[name] = torch.as_tensor(value).detach()
        grads = {}
        for name, leaf in self.model.leaves.items():
            if leaf.requires_grad:
                # A leaf that this loss doesn't use has a gradient of zeros, as on other ranks
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                grads[name] = grad.detach().clone()
        return Found(1.0 if weight is None else weight, metrics, grads)

    def _skips(self, loss: Tensor, grads: Named) -> bool:
        looks = self.case.nonfinite == "skip" or self.case.loss_scale
        fine = all(bool(x.isfinite().all()) for x in (loss, *grads.values()))
        return looks and not fine

    def _update(self, grads: Named) -> None:
        for name, grad in grads.items():
            self.model.leaves[name].grad = grad
        with default_dtype(torch.float64):  # of the numbers that torch's optimizers count in
            self.optimizer.step()

    @torch.no_grad()
    def between(self, parts: list[Batch]) -> Named:
        leaves = [leaf for leaf in self.module.parameters()]
        match self.case.between:
            case "shrink" | "shrink in place":
                for leaf in leaves:
                    leaf.mul_(0.9)
            case "whole leaves":
                for leaf in leaves:
                    leaf.div_(1 + leaf.abs().sum())
            case "init again":
                self.optimizer = optimizers.torchs(self.case.optimizer, self.trained)
            case "evaluate":
                return self._evaluate(parts)
        return {}

    def _evaluate(self, parts: list[Batch]) -> Named:
        metrics, weights = [], []
        for held, part in zip(self.buffers, parts, strict=True):
            self._set_buffers(held)
            metrics.append({"evaluated": squared_error(self.model, part)})
            weights.append(float(len(part["x"])))
        return mean_of_named(metrics, weights)

    @torch.no_grad()
    def _set_buffers(self, values: Named) -> None:
        """A module may have replaced its buffers, so their places are filled."""
        for name, value in values.items():
            path, _, attribute = name.rpartition(".")
            module = self.module.get_submodule(path)
            module._buffers[attribute] = value.clone()

    def seen(self, metrics: Named) -> Seen:
        return Seen(copied(self.model.leaves), self.buffers, metrics, {})
