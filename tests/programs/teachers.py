"""Programs with a teacher, or one of their own: an average of the student's params."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from tests.programs.case import Batch, Case, Plain, applied, descend, net

# Self-distillation: the teacher is a moving average of the student, and a frozen one of another
# architecture and dtype is read as well


class Byol(NamedTuple):
    student: Any
    teacher: Any
    frozen: Any
    opt: Any


def byol() -> Case:
    modules = {"student": net(7, 4, 6, 3), "frozen": net(8, 4, 5, 5, 3, dtype=torch.float32)}
    modules["frozen"].requires_grad_(False)
    forward, forward_frozen = applied(modules["student"]), applied(modules["frozen"])
    sgd = optim.sgd(0.1, momentum=0.9)

    def loss(student: Any, teacher: Any, frozen: Any, x: Tensor, view: Tensor) -> Any:
        target, known = forward(teacher, view), forward_frozen(frozen, x.float()).double()
        likeness = F.cosine_similarity(forward(student, x), target.detach(), dim=1).mean()
        distance = F.mse_loss(forward(student, x), known)
        return distance - likeness, fz.Aux(metrics={"likeness": likeness})

    def init(student: Any, frozen: Any) -> Byol:
        teacher = tree_map(torch.clone, student)
        return Byol(student, teacher, frozen, sgd.init(student))

    def program(value: Byol, batch: Batch) -> Any:
        trees = value.student, value.teacher, value.frozen
        (found, seen), grads = fz.value_and_grad(loss)(*trees, batch["x"], batch["view"])
        student, opt = sgd.apply(grads, value.opt, value.student)
        teacher = tree_map(lambda t, s: 0.9 * t + 0.1 * s, value.teacher, student)
        return Byol(student, teacher, value.frozen, opt), {"loss": found, **seen}

    def plain(batches: list[Batch], student: nn.Module, frozen: nn.Module) -> Plain:
        """Grill et al., "Bootstrap Your Own Latent" (2020)."""
        teacher, metrics = copy.deepcopy(student), []
        opt = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9)
        for batch in batches:
            with torch.no_grad():
                target, known = teacher(batch["view"]), frozen(batch["x"].float()).double()
            seen = student(batch["x"])
            likeness = F.cosine_similarity(seen, target, dim=1).mean()
            found = F.mse_loss(seen, known) - likeness
            descend(opt, found)
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                    t.mul_(0.9).add_(0.1 * s)
            metrics.append({"loss": found.detach(), "likeness": likeness.detach()})
        return Plain({"student": student, "teacher": teacher}, metrics)

    step = fz.program_step(program, init=init)
    return Case(step, modules, {"x": 4, "view": 4}, plain, dtypes=(torch.float32,))


# DINO: a student's outputs on three crops against a teacher's on two. The teacher is a moving
# average, and its outputs are centred by the moving average of the whole batch's mean


class Dino(NamedTuple):
    student: Any
    teacher: Any
    opt: Any
    center: Tensor  # (3,), whole on every rank


DINO = net(15, 4, 6, 3)
WHOLE_VIEWS, ALL_VIEWS = ("one", "two"), ("one", "two", "small")


def numbered(name: str, values: Tensor) -> dict[str, Tensor]:
    """A metric per element, since each metric is one number."""
    return {f"{name}{i}": x for i, x in enumerate(values)}


def dino_loss(seen: list[Tensor], known: list[Tensor], center: Tensor) -> Tensor:
    """Caron et al., "Emerging Properties in Self-Supervised Vision Transformers" (2021)."""
    losses = []
    for i, target in enumerate(known):
        wanted = ((target - center) / 0.04).softmax(1).detach()
        for j, output in enumerate(seen):
            if i != j:
                losses.append(-(wanted * (output / 0.1).log_softmax(1)).sum(1).mean())
    return torch.stack(losses).mean()


def plain_dino(batches: list[Batch], student: nn.Module) -> Plain:
    teacher, center, metrics = copy.deepcopy(student), torch.zeros(3).double(), []
    opt = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9)
    for batch in batches:
        with torch.no_grad():
            known = [teacher(batch[name]) for name in WHOLE_VIEWS]
        found = dino_loss([student(batch[name]) for name in ALL_VIEWS], known, center)
        descend(opt, found)
        center = 0.9 * center + 0.1 * torch.cat(known).mean(0)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.mul_(0.9).add_(0.1 * s)
        metrics.append({"loss": found.detach(), **numbered("center", center)})
    return Plain({"student": student, "teacher": teacher}, metrics)


def dino_case(gradient: Callable[[Dino, Batch], tuple[Tensor, Tensor, Any]], rows: int) -> Case:
    """`gradient` gives the loss, the next centre, and the student's gradients."""
    sgd = optim.sgd(0.1, momentum=0.9)

    def init(student: Any) -> Dino:
        teacher, center = tree_map(torch.clone, student), torch.zeros(3, dtype=torch.float64)
        return Dino(student, teacher, sgd.init(student), center)

    def program(value: Dino, batch: Batch) -> Any:
        found, center, grads = gradient(value, batch)
        student, opt = sgd.apply(grads, value.opt, value.student)
        teacher = tree_map(lambda t, s: 0.9 * t + 0.1 * s, value.teacher, student)
        return Dino(student, teacher, opt, center), {"loss": found, **numbered("center", center)}

    step, widths = fz.program_step(program, init=init), dict.fromkeys(ALL_VIEWS, 4)
    return Case(step, {"student": DINO}, widths, plain_dino, rows=rows)


def dino() -> Case:
    """The centre is a buffer, whose mean over ranks is that over the batch."""
    forward = applied(DINO)

    def loss(student: Any, teacher: Any, *, buffers: Any, batch: Batch) -> Any:
        known = [forward(teacher, batch[name]) for name in WHOLE_VIEWS]
        seen = [forward(student, batch[name]) for name in ALL_VIEWS]
        found = dino_loss(seen, known, buffers["center"])
        buffers["center"].mul_(0.9).add_(0.1 * torch.cat(known).mean(0))
        return found

    def gradient(value: Dino, batch: Batch) -> Any:
        (found, _, buffers), grads = fz.value_and_grad(loss)(
            value.student, value.teacher, buffers={"center": value.center}, batch=batch
        )
        return found, buffers["center"], grads

    return dino_case(gradient, rows=60)


def dino_weighted() -> Case:
    """The centre comes of metrics, whose means are by weight, since ranks' parts are uneven."""
    forward = applied(DINO)

    def loss(student: Any, teacher: Any, center: Tensor, batch: Batch) -> Any:
        known = [forward(teacher, batch[name]) for name in WHOLE_VIEWS]
        seen = [forward(student, batch[name]) for name in ALL_VIEWS]
        means = numbered("mean", torch.cat(known).mean(0))
        return dino_loss(seen, known, center), fz.Aux(metrics=means, weight=len(batch["one"]))

    def gradient(value: Dino, batch: Batch) -> Any:
        trees = value.student, value.teacher
        (found, means), grads = fz.value_and_grad(loss)(*trees, value.center, batch)
        mean = torch.stack([*means.values()])
        return found, 0.9 * value.center + 0.1 * mean, grads

    return dino_case(gradient, rows=61)
