"""A user's loss: its call, its checked results, micro-batches, and means by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple, TypeGuard

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import unwrapped
from ..errors import FunctorchZeroError, StructureError, explain
from ..model.buffer_copies import BufferCopy, Kept, copy_of, note_kept, noting_kept
from ..model.lazy_param import LazyParam
from ..params import is_on_engine
from ..tree import PyTree, has_values, outline, paths, same_structure


@dataclass(frozen=True)
class Aux:
    """The second result of a loss, beside its value.

    Attributes:
        buffers: the new buffers, as `apply` returned them. None: those that the loss was given,
            which it may have written to.
        metrics: 0-d tensors or numbers by name, averaged like the loss.
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
    metrics: Mapping[str, Tensor | float]  # 0-d each
    weight: Tensor | float | None  # >= 0; None: the loss gave none
    kept: Sequence[Kept] = ()  # buffers that backward must not write to; () after it

    @property
    def is_weighty(self) -> bool:
        """Whether the batch counts in means, and in those of buffers. The host waits for a device's
        weight."""
        return self.weight is None or float(self.weight) != 0


def call_loss(
    loss_fn: LossFn, params: Any, buffers: Any, batch: Any, rank: int | None = None
) -> Outcome:
    """Call a user's loss, with copies of the buffers, and check its results. Errors name the rank,
    if one is given."""
    old, treedef = optree.tree_flatten(buffers)
    copies = [copy_of(buffer) for buffer in old]
    own = treedef.unflatten([copied.tensor for copied in copies])
    with naming_batch(batch), noting_kept() as kept:
        result = loss_fn(params, own, batch)
    loss, given = check_loss(result, rank)
    aux = given or Aux()
    check_has_values({"loss": loss, **aux.metrics}, params, rank)
    # Without others, its own as the loss left them: written to, or replaced in their dict
    after, what = aux.buffers, "Aux.buffers"
    if after is None:
        after, what = own, "the loss's buffers"
    same_structure(buffers, after, what=what, rank=rank, remedy=_KEEP_BUFFERS)
    _check_buffers(after, rank)
    new = []
    for path, copied, buffer in zip(paths(buffers), copies, optree.tree_leaves(after), strict=True):
        new.append(_next_buffer(copied, buffer, aux.weight))
        if new[-1] is copied.old:
            note_kept(path, copied.tensor, kept)
    return Outcome(loss, treedef.unflatten(new), aux.metrics, aux.weight, kept)


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
        own = tree_map(lambda x: None if is_on_engine(x) else x, batch, is_leaf=is_on_engine)
        error.add_note(f"The {given_to} was given this batch: {outline(own)}")
        raise


@contextmanager
def noting_lost_graphs() -> Iterator[None]:
    """Around the step's own backward: torch's error for a graph that is gone gets a note."""
    try:
        yield
    except RuntimeError as error:
        # With a note already, it is an error of the loss itself
        if "backward through the graph a second time" in str(error) and not _notes_of(error):
            error.add_note(
                "The step runs backward itself, on the loss that it is given back, whose graph is "
                "gone. Remedy: return the loss without .backward(); for x.grad, call it with "
                "retain_graph=True, or on a graph of its own"
            )
        raise


def _notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _check_buffers(buffers: PyTree[Any], rank: int | None) -> None:
    """Raise, naming the first buffer that is no tensor."""
    for n, leaf in enumerate(optree.tree_leaves(buffers)):
        if not isinstance(leaf, Tensor):
            raise StructureError(
                explain(
                    "a new buffer is no tensor",
                    path=paths(buffers)[n],
                    got=type(leaf).__name__,
                    rank=rank,
                    remedy="make it one, with torch.tensor",
                )
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
    if type(loss) is LazyParam:
        loss = loss.whole()
    # Gradients are taken of one number
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"shape {tuple(loss.shape)}, {loss.dtype}"
        raise StructureError(
            explain(
                "the loss is not a scalar",
                expected="shape ()",
                got=got,
                rank=rank,
                remedy=_way_to_a_scalar(loss),
            )
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
            explain('a metric is called "loss", as the loss is', rank=rank, remedy="rename it")
        )
    return loss, replace(aux, metrics=constants(aux.metrics), weight=constant(aux.weight))


def constants(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, each in no graph, with values of its own."""
    return {name: constant(value) for name, value in metrics.items()}


def constant(value: Any) -> Any:
    """A metric or a weight in no graph. A 0-d param is copied: a sharded one keeps no values after
    the loss, and the whole leaf would keep its unit's memory."""
    if type(value) is LazyParam:
        with torch.no_grad():
            return value.whole().detach().clone()
    return value.detach() if isinstance(value, Tensor) else value


def _way_to_a_scalar(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return "reduce it, with .mean() for example, in a floating-point dtype"
    if isinstance(loss, int | float):
        return "return the 0-d tensor itself, without .item(): gradients are taken of it"
    return "return the loss, or (loss, fz.Aux(metrics={...})) for other results"


def check_has_values(results: Mapping[str, Any], params: PyTree[Any], rank: int | None) -> None:
    """Raise if a result is on the meta device, and no param is: it would be read as uninitialised
    memory.

    Args:
        results: the loss and metrics, by name.
        params: as the loss was given them.
        rank: for the error.
    """
    empty = [name for name, x in results.items() if _on_meta(x)]
    if not empty or any(map(_on_meta, optree.tree_leaves(params))):
        return
    raise StructureError(
        explain(
            "a result of the loss has no values: it was computed with tensors on the meta device, "
            "where none of the params is",
            path=empty[0],
            rank=rank,
            remedy="compute it from the params, buffers and batch that the loss is given; a module "
            "inside `apply` finds them in its own attributes, not in a copy that something else "
            "keeps",
        )
    )


def _on_meta(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "meta"


def independent(rank: int | None = None) -> StructureError:
    """The error for a loss that uses no param."""
    return StructureError(
        explain(
            "the loss does not depend on any trained leaf",
            rank=rank,
            remedy="compute it from the `params` it is given, with `apply` and not the module; "
            "without detach or item",
        )
    )


def gradients(
    loss: Tensor, leaves: Sequence[Tensor], seed: Tensor | None = None
) -> list[Tensor | None]:
    """The gradients of a loss, dense; None for a leaf that it doesn't reach.

    A custom function may run modules again in its backward, by a backward of its own. The gradients
    of that one go to the leaves' `.grad`, and count as well.

    Args:
        loss: 0-d.
        leaves: of autograd's graph, of this call's own.
        seed: 0-d, by which the gradients are multiplied; None: 1.
    """
    # A backward inside of the loss has left some, which are no part of its gradient
    for leaf in leaves:
        leaf.grad = None
    grads = []
    found = torch.autograd.grad(loss, leaves, seed, allow_unused=True)
    for leaf, grad in zip(leaves, found, strict=True):
        parts = [dense(part) for part in (grad, leaf.grad) if part is not None]
        grads.append(sum(parts[1:], parts[0]) if parts else None)
        leaf.grad = None
    return grads


def nodes_behind(loss: Tensor) -> set[str]:
    """The names of all nodes in the loss's graph, such as "AddmmBackward0"."""
    names, waiting, seen = set(), [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            waiting += [fn for fn, _ in node.next_functions]
    return names


def refuse_reentrant_checkpoints(nodes: set[str], rank: int | None = None) -> None:
    """Raise if one of the nodes behind a loss is a reentrant checkpoint.

    Its backward is one of its own, whose gradients of params go to `.grad`, where no step looks. So
    torch refuses it where gradients are asked for by tensor; but only where its inputs lead to
    such a tensor. Elsewhere the params inside would get none, without a word.
    """
    # Torch's own, and those made after it by other libraries, go by this name
    if "CheckpointFunctionBackward" in nodes:
        raise StructureError(
            explain(
                "the loss runs a reentrant checkpoint, which gives params no gradients",
                got="use_reentrant=True in torch.utils.checkpoint, or a function like it",
                rank=rank,
                remedy="checkpoint(..., use_reentrant=False), or functionalize(remat=...)",
            )
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
                explain(
                    "a metric is no real number",
                    path=name,
                    expected="a number or a 0-d tensor",
                    got=got,
                    rank=rank,
                    remedy=remedy,
                )
            )


def _fault_of_metric(value: Any) -> str | None:
    """The words for a metric that no mean can be taken of; None: it has no fault."""
    if isinstance(value, bool | int | float):  # most that are no tensors
        return None
    try:
        number = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return type(value).__name__
    fine = number.dim() == 0 and not number.is_complex()
    return None if fine else f"shape {tuple(number.shape)}, {number.dtype}"


def check_weight(weight: Any, rank: int | None = None) -> None:
    """Raise unless means can be taken with this weight."""
    if not isinstance(weight, Tensor | int | float | None):
        raise TypeError(f"Aux.weight must be a number or a 0-d tensor, got {type(weight).__name__}")
    if weight is None:
        return
    if isinstance(weight, Tensor) and (weight.dim() > 0 or weight.is_complex()):
        raise StructureError(
            explain(
                "Aux.weight is no weight",
                expected="a real number or a 0-d tensor of one",
                got=f"shape {tuple(weight.shape)}, {weight.dtype}",
                rank=rank,
                remedy="reduce it, with .sum() for example",
            )
        )
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise StructureError(
            explain(
                "Aux.weight requires grad, and means take weights as constants",
                expected="a number, or a tensor in no graph",
                got="requires_grad=True",
                rank=rank,
                remedy="detach it, with weight.detach()",
            )
        )
    # A device's is looked at in the steps that ask slow questions
    if not _on_device(weight):
        check_weight_value(weight, rank)


# Gradients are multiplied by weights before they are summed over ranks, in float32 or less, whose
# numbers end at 3e38 and lose digits below 1e-38
LEAST_WEIGHT, MOST_WEIGHT = 1e-20, 1e20


def check_weight_value(weight: Tensor | float | None, rank: int | None = None) -> None:
    """Raise unless a weight is 0, or a number in range. The host waits for a device's."""
    if weight is None or (isinstance(weight, Tensor) and not has_values(weight)):
        return
    number = float(weight)
    check_total_weight(number, rank)
    if number == 0 or LEAST_WEIGHT <= number <= MOST_WEIGHT:
        return
    raise StructureError(
        explain(
            "Aux.weight is out of range: gradients times weights would leave that of float32",
            expected=f"0, or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
            got=number,
            rank=rank,
            remedy="divide all weights by the same number: only their ratio counts",
        )
    )


def check_total_weight(total: float, rank: int | None = None) -> None:
    """Raise unless a sum of weights can divide. No gradient is multiplied by it, so that it may lie
    out of a weight's range."""
    if not 0 <= total < math.inf:
        raise StructureError(
            explain(
                "Aux.weight is no weight",
                expected=">= 0, and finite",
                got=total,
                rank=rank,
                remedy="count examples, or tokens; 0 counts for nothing",
            )
        )


def check_accumulate(count: Any) -> None:
    """Raise unless this is a number of micro-batches."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            explain(
                "accumulate is no number of micro-batches",
                expected="an int",
                got=f"{type(count).__name__} {count!r}",
                remedy="accumulate=int(...)",
            )
        )
    if count < 1:
        raise ValueError(f"accumulate must be at least 1, got {count}")


def micro_batches(batch: Any, count: int) -> list[Any]:
    """The batch in `count` parts along dim 0 of its tensors, the first ones larger by one where
    that doesn't divide; leaves without dims are in all of them."""
    if count == 1:
        return [batch]
    leaves, treedef = optree.tree_flatten(batch)
    _check_rows(batch)
    parts_of = []  # per leaf, its `count` parts
    for path, leaf in zip(paths(batch), leaves, strict=True):
        parts_of.append(_parts(path, leaf, count))
    micro = []
    for i in range(count):
        micro.append(treedef.unflatten([parts[i] for parts in parts_of]))
    return micro


def _check_rows(batch: Any) -> None:
    """Raise, naming the first leaf with another number of rows: its parts would belong to others'
    rows."""
    rows = {path: len(x) for path, x in _with_dims(batch)}
    first = next(iter(rows), "")
    for path, num in rows.items():
        if num != rows[first]:
            raise StructureError(
                explain(
                    "a batch is cut along dim 0 of its tensors, and these have unequal rows",
                    path=path,
                    expected=f"{rows[first]}, as {first} has",
                    got=num,
                    remedy="give each tensor a row per example; close over one that is no part of "
                    "the batch, or pass it as a number or a 0-d tensor",
                )
            )


def _with_dims(batch: Any) -> list[tuple[str, Tensor]]:
    rows = zip(paths(batch), optree.tree_leaves(batch), strict=True)
    return [(path, x) for path, x in rows if isinstance(x, Tensor) and x.dim() > 0]


def _parts(path: str, leaf: Any, count: int) -> list[Any]:
    """The `count` parts of one leaf of a batch."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return [leaf] * count
    # Parts of size 0 would have losses of NaN
    if 0 < len(leaf) < count:  # an empty batch is that of a rank which ran out of data
        remedy = "pass larger batches, or accumulate over fewer"
        raise StructureError(
            explain(
                "the batch is too small", path=path, expected=count, got=len(leaf), remedy=remedy
            )
        )
    return list(leaf.tensor_split(count))


def weighted_mean(values: Sequence[Any], outcomes: Sequence[Outcome]) -> Tensor:
    """The mean of one value per micro-batch, by their weights; 0 where nothing has weight.

    The values have one shape, the mean's: a leaf's gradients, or a metric.
    """
    tensors = [as_tensor(value) for value in values]
    # Added in the order of the micro-batches, so that the oracle's sums are always the same
    numerator: Tensor | None = None
    total: Tensor | None = None  # 0-d float64
    for value, outcome in zip(tensors, outcomes, strict=True):
        weight = as_weight(1.0 if outcome.weight is None else outcome.weight)
        term = unless_weightless(value, weight) * weight.to(value.device)
        numerator = term if numerator is None else numerator + term
        total = weight if total is None else total + weight
    assert numerator is not None and total is not None
    # All of weight 0: the numerator is 0, and so is the mean
    divisor = torch.where(total == 0, 1, total)
    mean = numerator / divisor.to(numerator.device)
    # A 0-d value has become float64 by its weight
    return mean.to(reduce(torch.promote_types, (value.dtype for value in tensors)))


def unless_weightless(
    value: Tensor, weight: Tensor | float | None, otherwise: Tensor | float = 0
) -> Tensor:
    """The value, or `otherwise` where the weight is 0: a number, or a tensor of the value's shape.

    A product with the weight would not do: the loss of a batch without examples is a mean of
    nothing, a NaN, and 0 times a NaN is one.
    """
    if weight is None:
        return value
    # On a device: chosen there, without waiting for the weight
    if _on_device(weight):
        return torch.where(weight == 0, otherwise, value)
    if float(weight) != 0:
        return value
    return otherwise if isinstance(otherwise, Tensor) else torch.full_like(value, otherwise)


def _on_device(weight: Tensor | float) -> TypeGuard[Tensor]:
    """Whether the host would have to wait for a device to know the weight."""
    return isinstance(weight, Tensor) and weight.device.type != "cpu"


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of several micro-batches as one."""
    if len(outcomes) == 1:
        return outcomes[0]
    _check_all_weighted(outcomes)
    _check_same_metrics(outcomes)
    metrics = {}
    # The names are equal in all, as was checked above
    for name in outcomes[-1].metrics:
        metrics[name] = weighted_mean([o.metrics[name] for o in outcomes], outcomes)
    return Outcome(
        loss=weighted_mean([o.loss for o in outcomes], outcomes),
        buffers=outcomes[-1].buffers,  # each micro-batch was given those of the one before
        metrics=metrics,
        weight=_total_weight(outcomes),
    )


def _total_weight(outcomes: Sequence[Outcome]) -> Tensor | None:
    """The sum of the micro-batches' weights, 0-d float64; None if they have none."""
    total: Tensor | None = None
    # All have a weight or none has
    for outcome in outcomes:
        if outcome.weight is not None:
            weight = as_weight(outcome.weight)
            # A negative one on a device is found by its sum, and other weights must not hide it
            weight = torch.where(weight < 0, math.nan, weight)
            total = weight if total is None else total + weight
    return total


def _check_all_weighted(outcomes: Sequence[Outcome]) -> None:
    """Raise if some micro-batches have a weight and others have none."""
    without = [i for i, outcome in enumerate(outcomes) if outcome.weight is None]
    if without and len(without) < len(outcomes):
        raise StructureError(
            explain(
                "some micro-batches have a weight, and others have none",
                expected="Aux.weight from every call of the loss, or from none",
                got=f"none from micro-batches {without} of {len(outcomes)}",
                remedy="give each a weight; 1 counts as much as none",
            )
        )


def _check_same_metrics(outcomes: Sequence[Outcome]) -> None:
    """Raise unless all micro-batches have metrics of the same names: else one has no mean."""
    expected = outcomes[0].metrics.keys()
    for i, outcome in enumerate(outcomes):
        if outcome.metrics.keys() != expected:
            raise StructureError(
                explain(
                    "micro-batches have different metrics",
                    expected=f"{sorted(expected)}, as from micro-batch 0",
                    got=f"{sorted(outcome.metrics)} from micro-batch {i} of {len(outcomes)}",
                    remedy="return the same metrics from every call of the loss",
                )
            )


def dense(grad: Tensor) -> Tensor:
    """A gradient as optimizers take it: an embedding's may be sparse."""
    return grad if grad.layout == torch.strided else grad.to_dense()


def as_tensor(value: Any) -> Tensor:
    """A tensor, detached; numbers become 0-d ones."""
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")


def as_weight(weight: Tensor | float) -> Tensor:
    """A weight as a 0-d float64 tensor: sums of counts and of shares are exact enough in it."""
    if isinstance(weight, Tensor):
        return weight.detach().to(torch.float64)
    return torch.tensor(weight, dtype=torch.float64, device="cpu")


def as_metric(value: Tensor | float) -> Tensor:
    """A metric as a 0-d floating-point tensor, since it will be averaged."""
    metric = as_tensor(value)
    # Integers, such as counts, would be cut off by a mean
    return metric if metric.is_floating_point() else metric.to(torch.get_default_dtype())
