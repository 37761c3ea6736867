"""`check_transform`: whether a transform does what its `needs` says, by its operators and by its
numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import version_of
from ..errors import StructureError, TransformError
from ..groups import run_ranks
from ..groups.protocol import Group
from ..layout.build import make_layout
from ..layout.flat_buffers import slice_tree
from ..optim.across import Owned, Pointwise, Tree, WholeLeaf
from ..optim.base import Needs, Transform
from ..optim.claims.check import check_claims, name_of, simple_parts
from ..optim.claims.cuts import CutTest, alone
from ..optim.claims.operators import Watch
from ..optim.local import Local, one_leaf
from ..sharded.params import all_gather_tree
from ..sharded_optim.across import Sharded
from ..tree import PyTree, paths
from .equality import Equality, Grade, assert_equal_updates, assert_equal_values

BITWISE, REORDERED = Equality("bitwise"), Equality("reordered")


def check_transform(
    transform: Transform,
    *,
    params: PyTree[Tensor] | None = None,
    seeds: Sequence[int] = (0, 1),
    steps: int = 3,
    ranks: Sequence[int] = (2, 3),
    grade: Grade | Equality | None = None,
) -> None:
    """Raise `TransformError`, naming the operator or the leaf that gives it away, if a transform is
    falsely tagged.

    First its operators are watched (`optim.claims.check.check_claims`). Then its numbers are
    compared: a pointwise part's on whole leaves, on pieces of them and on all leaves joined, bit by
    bit; a whole-leaf function's on repetition, with inputs unchanged, and in batches; and the whole
    transform's updates unsharded with those on ranks, which are threads of this process.

    Args:
        transform: any, also a chain or a wrapper.
        params: the tree it is meant for, where masks or labels bind it to one; float64 shows the
            most. None: a tree of hostile shapes.
        seeds: of the random updates, one run each.
        steps: updates in a run.
        ranks: numbers of ranks.
        grade: of equality, instead of bitwise for pointwise parts and transforms and reordered for
            the others.

    >>> from functorch_zero import optim
    >>> check_transform(optim.adamw(1e-3), seeds=(0,))
    """
    tree = hostile_params(large=transform.needs <= Needs.STATISTICS) if params is None else params
    held: Any = tree_map(torch.detach, tree)
    equality = None if grade is None else grade if isinstance(grade, Equality) else Equality(grade)
    with _bound_to_a_tree(params is None):
        check_claims(transform, held)
        for seed in seeds:
            for part in simple_parts(transform):
                if part.plain is not None:
                    for dtype in (torch.float64, torch.float32):
                        cast, name = _cast(held, dtype), name_of(part)
                        _check_pointwise(part.plain, cast, name, seed, steps, equality or BITWISE)
            _check_ranks(transform, held, seed, steps, ranks, equality)
            _check_fused(transform, held, seed, steps, equality or REORDERED)


def hostile_params(*, large: bool = True, seed: int = 0) -> Any:
    """A tree of shapes on which a wrong transform shows itself, float64.

    Some leaves share a bucket, some have one of their own, so that every rank has a part of them.
    Among them are leaves of equal shape, of one element and of none, and, if `large`, one that is
    longer than 4096 elements with both dims over 128, since optimizers change their ways there.
    """
    block = {
        "empty": (0, 3),
        "matrix": (7, 5),
        "one": (1,),
        "scalar": (),
        "twin": (7, 5),
        "vector": (6,),
    }
    alone = {
        "kernel": (4, 3, 2, 2),
        "stack": (2, 3, 4),
        "wide": (3, 11),
        **({"large": (257, 129)} if large else {}),
    }
    g = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    children = {name: {"weight": draw(shape)} for name, shape in alone.items()}
    return {
        "block": {name: draw(shape) for name, shape in block.items()},
        **children,
        "nothing": None,
    }


@contextmanager
def _bound_to_a_tree(default: bool) -> Iterator[None]:
    try:
        yield
    except (StructureError, ValueError) as error:
        if default and not isinstance(error, TransformError):
            error.add_note(
                "If this transform belongs to one tree of params, pass check_transform(..., "
                "params=that tree)."
            )
        raise


def _cast(tree: PyTree[Tensor], dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype), tree)


def _draw(tree: PyTree[Tensor], seed: int, steps: int) -> list[Any]:
    """Updates for each step, of several magnitudes, with some zeros."""
    g = torch.Generator().manual_seed(seed)

    def one(x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=g, dtype=torch.float64)
        return torch.where(torch.rand(x.shape, generator=g) < 0.1, 0.0, drawn).to(x.dtype)

    return [tree_map(lambda x, s=10.0**-k: one(x) * s, tree) for k in range(steps)]


# A pointwise part, on whole leaves and on the same elements cut otherwise


def _check_pointwise(
    part: Pointwise, tree: Any, name: str, seed: int, steps: int, equality: Equality
) -> None:
    """A pointwise update of whole leaves, of pieces of them, and of all joined to one."""

    def difference_of(expected: Tensor, got: Tensor) -> str | None:
        pair: list[Any] = [{"": expected}, {"": got}]
        try:
            assert_equal_values(*pair, grade=equality, what="updates")
        except AssertionError as error:
            return str(error)
        return None

    drawn = _draw(tree, seed, steps)
    CutTest(alone(part), tree, drawn, Watch(name), difference_of, regroup=True).check()


@contextmanager
def _as_transform_error(story: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise TransformError(f"{story}: {error}") from None


# The whole transform, unsharded and on ranks


def _check_ranks(
    transform: Transform,
    params: Any,
    seed: int,
    steps: int,
    ranks: Sequence[int],
    equality: Equality | None,
) -> None:
    drawn, name = _draw(params, seed, steps), name_of(transform)
    expected = _run_unsharded(transform, params, drawn, name, equality or REORDERED)
    grade = equality or (BITWISE if transform.needs == Needs.POINTWISE else REORDERED)
    for num_ranks in ranks:
        for donate in (False, True):
            got = run_ranks(_on_a_rank(transform, params, drawn, donate), num_ranks)
            for k, want in enumerate(expected):
                for rank in range(num_ranks):
                    at = {"step": k, "ranks": num_ranks, "rank": rank}
                    with _as_transform_error(f"{name} makes other updates on ranks than unsharded"):
                        assert_equal_values(
                            want, got[rank][k], grade=grade, what="updates", context=at
                        )


def _on_a_rank(
    transform: Transform, params: Any, drawn: list[Any], donate: bool
) -> Callable[[Group], list[Any]]:
    """A function of a group: the updates of each step, gathered."""

    def run(group: Group) -> list[Any]:
        layout = make_layout(params, group.size, trainable=lambda path, leaf: True)
        across = Sharded(layout, group, donate=donate)
        held = slice_tree(params, layout, group.rank)
        state = transform.init(held, across)
        gathered = []
        for updates in drawn:
            new, state = transform.update(
                slice_tree(updates, layout, group.rank), state, held, across
            )
            gathered.append(tree_map(torch.clone, all_gather_tree(new, layout, group)))
        return gathered

    return run


def _run_unsharded(
    transform: Transform, params: Any, drawn: list[Any], name: str, equality: Equality
) -> list[Any]:
    """The updates of each step in one process, with whole-leaf functions and purity checked on the
    way."""
    across = _Checking(params, name, equality)
    state = transform.init(params, across)
    made = []
    for updates in drawn:
        with unchanged({"updates": updates, "state": state, "params": params}, name):
            new, state = transform.update(updates, state, params, across)
        made.append(new)
    return made


@contextmanager
def unchanged(inputs: Any, name: str) -> Iterator[None]:
    """Raise `TransformError` if a tensor in `inputs` has other values, or has been written to,
    afterwards."""
    leaves: list[Any] = optree.tree_leaves(inputs)
    rows = zip(paths(inputs), leaves, strict=True)
    before = [(path, x, x.clone(), version_of(x)) for path, x in rows if isinstance(x, Tensor)]
    yield
    for path, x, copy, version in before:
        if (
            version_of(x) != version
            or x.shape != copy.shape
            or not torch.equal(x.nan_to_num(), copy.nan_to_num())
        ):
            raise TransformError(
                f"{name} changes its input {path} in place. Remedy: return new tensors"
            )


class _Checking(Local):
    """`Local`, which also tries each whole-leaf function it is given."""

    def __init__(self, params: Tree, name: str, equality: Equality):
        super().__init__(params)
        self._name, self._equality = name, equality

    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        leaves, treedef = optree.tree_flatten(updates)
        states: list[Any] = treedef.flatten_up_to(state)
        rows = zip(paths(updates), leaves, states, optree.tree_leaves(params), strict=True)
        for path, update, owned, param in rows:
            self._try(part, path, update, owned, param)
        return super().run_whole(part, updates, state, params)

    def _try(self, part: WholeLeaf, path: str, update: Tensor, owned: Owned, param: Tensor) -> None:
        """Repeat one leaf's update, and run it in a batch."""
        who = f"{self._name}, a whole-leaf function,"
        with unchanged({path: {"update": update, "state": owned.state, "param": param}}, who):
            first, second = (one_leaf(part, update, owned, param) for _ in range(2))
        if first[0].shape != update.shape:
            raise TransformError(
                f"{who} makes an update of shape {tuple(first[0].shape)} of leaf {path}"
            )
        with _as_transform_error(
            f"{who} is not a function: the same inputs give different results"
        ):
            _compare_leaf(path, first, second, BITWISE)
        if part.batched:
            other = one_leaf(part, update * -0.5, owned, param)
            both, states = _in_a_batch(part, [update, update * -0.5], owned, param)
            for k, alone in enumerate((first, other)):
                with _as_transform_error(
                    f"{who} makes something else of leaf {path} in a batch of two than alone"
                ):
                    _compare_leaf(
                        path,
                        alone,
                        (both[k], Owned(tree_map(lambda x, k=k: x[k], states), 0)),
                        self._equality,
                    )


def _in_a_batch(
    part: WholeLeaf, updates: list[Tensor], owned: Owned, param: Tensor
) -> tuple[Tensor, Any]:
    stacked = tree_map(lambda x: torch.stack([x] * len(updates)), owned.state)
    return part.update(
        torch.stack(updates),
        stacked,
        torch.stack([param] * len(updates)) if part.wants_param else None,
    )


def _compare_leaf(
    path: str, a: tuple[Tensor, Owned], b: tuple[Tensor, Owned], equality: Equality
) -> None:
    pair: list[Any] = [{path: {"update": update, "state": owned.state}} for update, owned in (a, b)]
    assert_equal_values(*pair, grade=equality, what="results", dtypes={a[0].dtype})


# A transform's kernel for donated storage


def _check_fused(
    transform: Transform, params: Any, seed: int, steps: int, equality: Equality
) -> None:
    """A transform's fused kernel against its plain update, on all leaves joined."""
    fused, plain = transform.fused, transform.plain
    if fused is None or plain is None:
        return
    flat = torch.cat([x.reshape(-1) for x in optree.tree_leaves(params)])
    if not fused.takes(flat):
        return
    joined: Any = {"": flat}
    expected, got = flat.clone(), flat.clone()
    state, fused_state = plain.init(joined), plain.init(joined)
    for k, drawn in enumerate(_draw(joined, seed, steps)):
        old, old_got = expected.clone(), got.clone()
        made, state = plain.update(drawn, state, _tree(expected))
        expected = expected + optree.tree_leaves(made)[0]
        (fused_state,) = fused.update([got], [drawn[""].clone()], [fused_state])
        with _as_transform_error(
            f"the fused kernel of {name_of(transform)} does something else than its plain update"
        ):
            trees = _tree(old), _tree(expected), _tree(got)
            assert_equal_updates(
                *trees, old_got=_tree(old_got), grade=equality, context={"step": k}
            )


def _tree(leaf: Tensor) -> Any:
    return {"": leaf}
