"""The leaves that a step trains: chosen by a rule, and compared with those of a state."""

from __future__ import annotations

from collections.abc import Callable

import optree
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..shared_elements import check_apart
from ..tree import PyTree, mask_of, named_leaves, paths, select
from .refit import without_values
from .state import Trained, check_params

Trainable = PyTree[bool] | Callable[[str, Tensor], bool] | None


def mark_trainable(params: PyTree[Tensor], trainable: Trainable) -> PyTree[Tensor]:
    """The params, with `requires_grad` saying which leaves are trained."""
    check_params(params)
    if trainable is not None:
        mask = mask_of(params, trainable)
        _check_floating(params, mask)
        params = tree_map(lambda p, train: p.detach().requires_grad_(train), params, mask)
    check_apart(params)
    # A step that trains nothing would still run, and mislead
    if not any(p.requires_grad for p in optree.tree_leaves(params)):
        raise _nothing_trained(params, trainable)
    return params


def check_trained(trainable: Trainable, params: PyTree[Tensor], rank: int | None = None) -> None:
    """Raise, naming a leaf, if a step's rule chooses other leaves than its state says are trained:
    the state is another step's.

    Args:
        trainable: the step's. A function sees meta tensors, so one that goes by values or by
            identity can't be asked again; those choose all leaves then, or none, or raise.
        params: tensors of the whole leaves' shapes and dtypes, trained as the state says.
    """
    if trainable is None:
        return
    try:
        asked = optree.tree_leaves(mask_of(tree_map(without_values, params), trainable))
    except Exception:
        # A function's own error, a KeyError by identity say, is no answer
        if callable(trainable):
            return
        raise
    if callable(trainable) and (all(asked) or not any(asked)):
        return
    check_alike(
        Trained(tuple(zip(paths(params), map(bool, asked), strict=True))),
        Trained.of(params),
        "the state is of a step that trains other leaves",
        rank=rank,
        remedy="call this step's own init, and carry the params over: "
        "state.replace(params=other.params)",
    )


def check_alike(
    expected: Trained, got: Trained, what: str, *, rank: int | None, remedy: str
) -> None:
    """Raise, naming the first leaf, unless the same leaves of one tree are trained. `what` and
    `remedy`: of the error."""
    for (path, wanted), (_, found) in zip(expected.by_path, got.by_path, strict=True):
        if wanted != found:
            raise StructureError(
                what,
                path=path,
                expected="trained" if wanted else "frozen",
                got="trained" if found else "frozen",
                rank=rank,
                remedy=remedy,
            )


def _nothing_trained(params: PyTree[Tensor], trainable: Trainable) -> StructureError:
    known = paths(params)
    if not known:
        return StructureError(
            "params have no leaves",
            got=f"a {type(params).__name__}",
            remedy="step.init(params, buffers): params come first",
        )
    names = ", ".join([*known[:3], "..."] if len(known) > 3 else known)
    if trainable is not None:
        return StructureError(
            "no leaf of params is trained: trainable chose none",
            got=f"leaves {names}",
            remedy="let trainable be true for the paths to train; fz.named_leaves(params) has "
            "them all",
        )
    return StructureError(
        "no leaf of params is trained: none has requires_grad",
        got=f"leaves {names}",
        remedy="pass trainable=lambda path, leaf: True to train_step, or call "
        "requires_grad_() on the leaves",
    )


def _check_floating(params: PyTree[Tensor], mask: PyTree[bool]) -> None:
    """Raise, naming the first leaf that is to be trained and can't have a gradient."""
    # Autograd has gradients of floating-point and complex leaves only
    for path, leaf in named_leaves(select(params, mask)).items():
        if not (leaf.is_floating_point() or leaf.is_complex()):
            remedy = "leave it out of `trainable`, or convert it"
            raise StructureError(
                "an integer leaf can't be trained", path=path, got=leaf.dtype, remedy=remedy
            )
