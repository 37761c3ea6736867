"""A user's loss: its call, and its checked results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._torch_private import unwrapped
from ..errors import FunctorchZeroError, StructureError, explain
from ..in_a_loss import running_a_loss
from ..model.buffer_copies import BufferCopy, Changed, Left, copy_of, note_left, noting_buffers
from ..model.lazy_param import LazyParam
from ..params import without_engines
from ..tree import PyTree, outline, paths, same_structure
from .weights import check_weight, unless_weightless


@dataclass(frozen=True)
class Aux:
    """The second result of a loss, beside its value.

    Attributes:
        buffers: the new buffers, as `apply` returned them. None: those that the loss was given,
            which it may have written to.
        metrics: 0-d tensors or numbers by name, averaged like the loss. Their values are those when
            the loss returns.
        weight: the share of this batch in means over batches: its number of tokens, say. None:
            each rank's batch counts the same. A batch of weight 0 counts for nothing: neither its
            loss, metrics and gradients nor the buffers that it changed. Only ratios count; keep
            weights near 1 where gradients are reduced in float16.
    """

    buffers: Mapping[str, Tensor] | None = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    weight: Tensor | float | None = None


LossFn = Callable[[Any, Any, Any], Tensor | tuple[Tensor, Aux]]
Metrics = dict[str, Tensor]


class Outcome(NamedTuple):
    """The results of one call of a loss."""

    loss: Tensor  # 0-d floating-point; differentiable until gradients have been taken
    buffers: PyTree[Tensor]  # the new ones, whole; the old ones where the batch weighs nothing
    metrics: Mapping[str, Any]  # 0-d tensors, floating-point
    weight: Tensor | float | None  # >= 0; None: the loss gave none
    left: Sequence[Left] = ()  # buffers that backward must not write to; () after it
    lost: Sequence[Changed] = ()  # buffers that `apply` may have changed, and the loss kept

    @property
    def is_weighty(self) -> Tensor | bool:
        """Whether the batch counts in means, and in those of buffers; 0-d."""
        return self.weight is None or self.weight != 0


def call_loss(
    loss_fn: LossFn,
    params: Any,
    buffers: Any,
    batch: Any,
    rank: int | None = None,
    *,
    dry: bool,
) -> Outcome:
    """Call a user's loss, with copies of the buffers, and check its results.

    Args:
        loss_fn: called with params, copies of the buffers, and the batch.
        rank: for errors, if one is given.
        dry: whether a param whose gradient is taken is on the meta device.
    """
    check_records("a gradient", rank)
    old, treedef = optree.tree_flatten(buffers)
    copies = [copy_of(buffer) for buffer in old]
    own = treedef.unflatten([copied.tensor for copied in copies])
    with naming_batch(batch), noting_buffers() as of_loss, running_a_loss(rank):
        result = loss_fn(params, own, batch)
    left = of_loss.left
    loss, given = check_loss(result, rank)
    aux = given or Aux()
    check_has_values({"loss": loss, **aux.metrics}, rank, dry=dry)
    if given is not None:
        _, as_given = result
        _note_given(as_given, left)
    # Without others, its own as the loss left them: written to, or replaced in their dict
    after, what = aux.buffers, "Aux.buffers"
    if after is None:
        after, what = own, "the loss's buffers"
    same_structure(buffers, after, what=what, rank=rank, remedy=_KEEP_BUFFERS)
    _check_buffers(after, rank)
    new, unwritten = [], set()
    for path, copied, buffer in zip(paths(buffers), copies, optree.tree_leaves(after), strict=True):
        new.append(_next_buffer(copied, buffer, aux.weight))
        if new[-1] is copied.old:
            note_left(path, copied.tensor, left)
            unwritten.add(id(copied.tensor))
    # A loss that returns buffers has chosen; else new ones of `apply` should have been its own
    lost = []
    if aux.buffers is None:
        lost = [changed for changed in of_loss.changed if id(changed.copied.old) in unwritten]
    return Outcome(loss, treedef.unflatten(new), aux.metrics, aux.weight, left, lost)


def _note_given(aux: Any, left: list[Left]) -> None:
    """Note the tensors of a loss's `Aux`, its metrics and weight, whose values have been taken."""
    for name, value in {**aux.metrics, "Aux.weight": aux.weight}.items():
        if isinstance(value, Tensor):
            note_left(name, value, left, what="a metric or weight")


@contextmanager
def naming_batch(batch: Any, *, given_to: str = "loss") -> Iterator[None]:
    """Around a user's function: its errors get a note with the batch's leaves, as this rank has
    them."""
    try:
        yield
    except FunctorchZeroError:
        raise
    except Exception as error:
        # torch names an operator, and no leaf of the batch. Sharded trees among it are no batch
        told = outline(without_engines(batch))
        error.add_note(f"The {given_to} was given this batch: {told}")
        raise


def _check_buffers(buffers: PyTree[Any], rank: int | None) -> None:
    """Raise, naming the first buffer that is no tensor."""
    for n, leaf in enumerate(optree.tree_leaves(buffers)):
        if not isinstance(leaf, Tensor):
            raise StructureError(
                "a new buffer is no tensor",
                path=paths(buffers)[n],
                got=type(leaf).__name__,
                rank=rank,
                remedy="make it one, with torch.tensor",
            )


def _next_buffer(copied: BufferCopy, after: Tensor, weight: Tensor | float | None) -> Tensor:
    """A buffer after a loss: the very tensor before it, where nothing changed, or the batch weighs
    nothing."""
    if not copied.is_changed(after):
        return copied.old
    return unless_weightless(_without_history(after), weight, otherwise=copied.old)


_KEEP_BUFFERS = "return the tree of buffers that the loss was given, with new leaves"


def _without_history(buffer: Tensor) -> Tensor:
    """The buffer as the next call may use it: plain, in no autograd graph, and not wrapped by a
    transform of torch.func that has ended."""
    buffer = unwrapped(buffer)
    if type(buffer) is Tensor and not buffer.requires_grad:
        return buffer
    return buffer.detach()


def check_loss(result: Any, rank: int | None = None) -> tuple[Tensor, Aux | None]:
    """The loss, 0-d and differentiable, and the `Aux` that a user's loss returned beside it, if
    any."""
    loss, aux = result, None
    # A pair is (loss, Aux); anything else is the loss itself, or an error below
    if isinstance(result, tuple) and len(result) == 2:
        loss, aux = result
    if not isinstance(aux, Aux | None):
        raise TypeError(
            f"a loss returns a tensor, or (tensor, fz.Aux(...)); got {type(aux).__name__} as the "
            "second. Remedy: fz.Aux(buffers=..., metrics={...})"
        )
    # A 0-d param, as it is: only an operator would have made it whole
    if isinstance(loss, LazyParam):
        loss = loss.whole()
    # Gradients are taken of one number
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"shape {tuple(loss.shape)}, {loss.dtype}"
        raise StructureError(
            "the loss is not a scalar",
            expected="shape () of a real floating-point dtype",
            got=got,
            rank=rank,
            remedy=_way_to_a_scalar(loss),
        )
    # Without a graph backward would raise later, and say less
    if not loss.requires_grad:
        raise independent(rank)
    if aux is None:
        return loss, None
    check_weight(aux.weight, rank)
    check_metrics(aux.metrics, rank)
    # The step's own metric has that name
    if "loss" in aux.metrics:
        raise StructureError(
            'a metric is called "loss", as the loss is', rank=rank, remedy="rename it"
        )
    return loss, replace(aux, metrics=constants(aux.metrics), weight=constant(aux.weight))


def constants(metrics: Mapping[str, Any]) -> Metrics:
    """The metrics as 0-d tensors, each in no graph, with values of its own."""
    return {name: as_metric(constant(value)) for name, value in metrics.items()}


def constant(value: Any) -> Any:
    """A metric or a weight in no graph: a copy, since its value is the present one. Ranks send it
    before backward, in which somebody may write to it. A sharded 0-d param keeps no values after
    the loss."""
    if isinstance(value, LazyParam):
        with torch.no_grad():
            value = value.whole()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _way_to_a_scalar(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return "reduce it, with .mean() for example, in a floating-point dtype"
    if isinstance(loss, int | float):
        return "return the 0-d tensor itself, without .item(): gradients are taken of it"
    return "return the loss, or (loss, fz.Aux(metrics={...})) for other results"


def check_has_values(results: Mapping[str, Any], rank: int | None, *, dry: bool) -> None:
    """Raise if a result is on the meta device: it would be read as uninitialised memory.

    Args:
        results: the loss and metrics, by name.
        rank: for the error.
        dry: whether a param is there that is trained or evaluated. A tree on the meta device that
            a loss only reads doesn't make it a dry run.
    """
    empty = [name for name, x in results.items() if on_meta([x])]
    if dry or not empty:
        return
    raise StructureError(
        "a result of the loss has no values: it was computed with tensors on the meta device, "
        "where none of the params is",
        path=empty[0],
        rank=rank,
        remedy="compute it from the params, buffers and batch that the loss is given; a module "
        "inside `apply` finds them in its own attributes, not in a copy that something else "
        "keeps",
    )


def on_meta(leaves: Iterable[Any]) -> bool:
    """Whether one of them is a tensor without values, in a dry run say."""
    return any(isinstance(x, Tensor) and x.device.type == "meta" for x in leaves)


def check_records(what: str, rank: int | None = None) -> None:
    """Raise in torch.inference_mode(), where autograd records nothing, and `enable_grad` changes
    nothing about it: the loss would seem to use no param."""
    if torch.is_inference_mode_enabled():
        raise StructureError(
            f"{what} was asked for in torch.inference_mode(), whose tensors are never "
            "differentiated",
            rank=rank,
            remedy="leave that mode around training steps and their init; evaluations may run "
            "in it",
        )


def independent(rank: int | None = None) -> StructureError:
    """The error for a loss that uses no param."""
    return StructureError(
        "the loss does not depend on any trained leaf",
        rank=rank,
        remedy="compute it from the `params` it is given, with `apply` and not the module; "
        "without detach or item",
    )


def untrained(rank: int | None = None) -> StructureError:
    """The error for a gradient by a tree without trained leaves."""
    return StructureError(
        "a gradient was asked of a tree of which no leaf is trained",
        expected="a leaf that requires grad",
        rank=rank,
        remedy="leaf.requires_grad_() before the tree is given to init, or is cut. Of what "
        "tree_map makes of a tree no leaf is trained, unless the mapped function ends with "
        ".requires_grad_()",
    )


def check_metrics(metrics: Any, rank: int | None = None) -> None:
    """Raise, naming the first at fault, unless metrics are real numbers by name."""
    remedy = "return numbers or 0-d tensors, by .mean() for example; what is no number is a row, "
    remedy += "which evaluations may return"
    if not isinstance(metrics, Mapping):
        raise TypeError(
            explain(
                "metrics are no dict",
                expected="real numbers by name",
                got=type(metrics).__name__,
                rank=rank,
                remedy=remedy,
            )
        )
    for name, value in metrics.items():
        if got := _fault_of_metric(value):
            raise StructureError(
                "a metric is no real number",
                path=name,
                expected="a number or a 0-d tensor",
                got=got,
                rank=rank,
                remedy=_AUX_IS_BESIDE if isinstance(value, tuple) else remedy,
            )


_AUX_IS_BESIDE = (
    "fz.value_and_grad gives ((value, metrics), grads) where the loss returns an Aux: take them "
    "apart, and return a metric for each"
)


def _fault_of_metric(value: Any) -> str | None:
    """The words for a metric that no mean can be taken of; None: it has no fault."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an int that int64 doesn't hold; float(number) is one that float64 holds"
    if isinstance(value, bool | int | float):  # most that are no tensors
        return None
    try:
        number = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return type(value).__name__
    fine = number.dim() == 0 and not number.is_complex()
    return None if fine else f"shape {tuple(number.shape)}, {number.dtype}"


def as_metric(value: Tensor | float) -> Tensor:
    """A metric as a 0-d floating-point tensor, since it will be averaged."""
    metric = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    metric = metric.detach()
    # Integers, such as counts, would be cut off by a mean
    return metric if metric.is_floating_point() else metric.to(torch.get_default_dtype())
