"""What a rank holds at level 3: its pieces, activations and the units in flight. Live bytes,
measured, not time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from functorch_zero import apply_updates, optim, program_step, unshard, value_and_grad
from functorch_zero.groups import CountingGroup
from functorch_zero.layout.piece import Piece
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.modules import Net, in_turn, seeded
from tests.tiers import THOROUGH, tiers

# A piece of a block has more words than those that a watch copies, where it looks at values
WIDTH, DEPTH, ROWS = 128, 8, 2
UNIT = WIDTH * WIDTH * 8  # bytes of a block; activations are a hundredth of it


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made under it that are still alive, and the most there were.

    Args:
        smallest: bytes of the smallest storage that counts.
    """

    def __init__(self, smallest: int = 0) -> None:
        super().__init__()
        self._smallest = smallest
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Piece in types:  # its operators run on what is here
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self._add(x)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage._cdata in self._known or storage.nbytes() < self._smallest:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def deep(depth: int = DEPTH) -> Net:
    """Equal blocks, then a small head."""
    return Net(
        lambda net, x: net.head(in_turn(net.blocks, x)),
        blocks=nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)),
        head=nn.Linear(WIDTH, 1),
    )


def half() -> Net:
    """Half as many blocks."""
    return deep(DEPTH // 2)


def peak(
    ranks: int, make: Callable[[], nn.Module] = deep, trainable: Any = None, **options: Any
) -> float:
    """The most bytes, in units of a block, that a step makes beside the state it is given."""
    apply, params, _ = seeded(lambda: functionalize(make().double()))
    step = train_step(
        lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1), trainable=trainable
    )
    sharded = shard(step, level=3, group=CountingGroup(ranks), **options)
    state = sharded.init(params)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    found = []
    for _ in range(3):
        with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
            state, _ = sharded(state, x)
        found.append(live.peak)
    del state
    return max(found) / UNIT


def test_the_measure_sees_what_lives() -> None:
    with LiveBytes() as live:
        a = torch.zeros(100, dtype=torch.float64)
        b = a.view(10, 10).t()
        del a
        assert live.now == 800
        del b
        assert (live.now, live.peak) == (0, 800)
        torch.zeros(50, dtype=torch.float64)
        assert (live.now, live.peak) == (0, 800)


RANKS = 24  # so that a piece is small beside a unit: all gradient pieces together are half a unit


def test_a_few_units_at_a_time() -> None:
    """A unit in use and the next on its way; in backward a gradient and its reduction beside
    them."""
    assert peak(RANKS) <= DEPTH / RANKS + 3.5


def test_without_regathering_the_params_stay() -> None:
    kept = peak(RANKS, reshard_after_forward=False)
    assert DEPTH <= kept <= DEPTH + DEPTH / RANKS + 2


def test_depth_does_not_matter() -> None:
    assert peak(RANKS) - peak(RANKS, half) <= DEPTH / 2 / RANKS + 0.5


def test_frozen_units_are_let_go_in_backward() -> None:
    """Backward goes through all of them to the only trained one, the first."""
    assert peak(RANKS, trainable=lambda path, leaf: path.startswith("blocks.0.")) <= 3.5


@THOROUGH
def test_a_smaller_world_holds_larger_pieces() -> None:
    small, large = peak(2), peak(RANKS)
    assert small - large == pytest.approx(DEPTH / 2 - DEPTH / RANKS, abs=2), "gradient pieces"


@pytest.mark.parametrize("level", tiers([3], [2]))
def test_gradients_are_freed_unit_by_unit(level: int) -> None:
    """Whole gradients of all blocks never live together: at level 2 params are whole, but no part
    of the peak."""
    apply, params, _ = seeded(lambda: functionalize(deep().double()))
    step = train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1))
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    peaks = {}
    for number in (0, level):
        sharded = shard(step, level=number, group=CountingGroup(RANKS))
        state = sharded.init(params)
        with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
            sharded(state, x)
        peaks[number] = live.peak / UNIT
    assert peaks[0] >= DEPTH and peaks[level] <= 5


# Programs: several gradients, which are kept until one update


def program_peak(
    program: Any, *models: Callable[[], nn.Module], init: Callable[..., Any] | None = None
) -> float:
    """The most bytes, in units of a block, that a program's step makes beside its state. `init`:
    the program's; None: the value is a tuple of the trees."""
    trees, losses = [], []
    for make in models:
        apply, params, _ = functionalize(seeded(make).double())
        trees.append(params)
        losses.append(lambda p, x, apply=apply: apply(p, {}, x)[0].square().mean())
    init = TAKES[len(trees)] if init is None else init
    step = program_step(lambda value, x: (program(value, losses, x), {}), init=init)
    sharded = shard(step, level=3, group=CountingGroup(RANKS))
    state = sharded.init(*trees)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    found = []
    for _ in range(3):
        with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
            state, _ = sharded(state, x)
        found.append(live.peak)
    del state
    return max(found) / UNIT


TAKES = {1: lambda params: (params,), 2: lambda params, others: (params, others)}
PIECES = DEPTH / RANKS  # of a tree of the deep model, or of its gradients


def several(num: int, *, moving: bool) -> Callable[..., Any]:
    """A program of several gradients, each but the first at displaced params if `moving`."""

    def program(value: Any, losses: Any, x: Tensor) -> Any:
        (params,), (loss,) = value, losses
        places, found = [params], []
        for i in range(num):
            found.append(value_and_grad(loss)(places[-1], x)[1])
            if moving and i < num - 1:
                updates = tree_map(lambda g: 0.1 * g, found[-1])
                places.append(apply_updates(params, updates))
                del updates
        return (apply_updates(params, tree_map(lambda *g: -0.1 * sum(g), *found)),)

    return program


@pytest.mark.parametrize("num", tiers(thorough=[2, 4]))
def test_a_gradient_that_is_kept_costs_its_pieces(num: int) -> None:
    one = program_peak(several(1, moving=False), deep)
    kept = program_peak(several(num, moving=False), deep)
    assert one <= PIECES + 3.5
    assert kept - one == pytest.approx((num - 1) * PIECES, abs=0.1)


@pytest.mark.parametrize("num", tiers(thorough=[2, 4]))
def test_a_displaced_tree_costs_its_pieces(num: int) -> None:
    one = program_peak(several(1, moving=False), deep)
    moved = program_peak(several(num, moving=True), deep)
    assert moved - one == pytest.approx(2 * (num - 1) * PIECES, abs=0.15)


@pytest.mark.parametrize("order", tiers(thorough=[(1, 0), (0, 1)]))
def test_the_largest_gradient_decides(order: tuple[int, int]) -> None:
    """Two networks: the passes come one after the other, and only pieces of the first are kept."""

    def program(value: Any, losses: Any, x: Tensor) -> Any:
        found = {i: value_and_grad(losses[i])(value[i], x)[1] for i in order}
        new = [apply_updates(params, found[i]) for i, params in enumerate(value)]
        return tuple(new)

    alone = program_peak(several(1, moving=False), deep)
    both = program_peak(program, deep, half)
    assert both <= alone + PIECES + 0.1


@pytest.mark.parametrize(
    ("first", "pieces"), tiers(thorough=[(half, PIECES / 2), (deep, PIECES)], rows=True)
)
def test_a_tree_updated_before_the_last_gradient_costs_its_pieces(
    first: Callable[[], nn.Module], pieces: float
) -> None:
    """Its next params and both of Adam's moments lie beside the old ones then."""
    adam = optim.adam(1e-3)

    def init(*trees: Any) -> Any:
        return tuple((params, adam.init(params)) for params in trees)

    def program(value: Any, losses: Any, x: Tensor) -> Any:
        new = []
        for (params, opt_state), loss in zip(value, losses, strict=True):
            grads = value_and_grad(loss)(params, x)[1]
            new.append(adam.apply(grads, opt_state, params))
            del grads
        return tuple(new)

    alone = program_peak(several(1, moving=False), deep)
    both = program_peak(program, first, deep, init=lambda a, b: init(a, b))
    assert both - alone == pytest.approx(3 * pieces, abs=0.1)


def frozen_deep() -> nn.Module:
    """A teacher, which is only read."""
    return deep().requires_grad_(False)


@THOROUGH
def test_a_teacher_in_the_loss_is_never_whole() -> None:
    """A moving average of the student: its units come and go as the student's do."""

    def distillation(use: Callable[[Any], Any]) -> Callable[..., Any]:
        def program(value: Any, losses: Any, x: Tensor) -> Any:
            def loss(student: Any, teacher: Any, x: Tensor) -> Tensor:
                known = losses[1](use(teacher), x)
                return (losses[0](student, x) - known - 1).square()

            _, grads = value_and_grad(loss)(*value, x)
            student = apply_updates(value[0], tree_map(lambda g: -0.1 * g, grads))
            teacher = tree_map(lambda t, s: 0.9 * t + 0.1 * s.detach(), value[1], student)
            return student, teacher

        return program

    # The student alone takes PIECES + 3.5. The leaves that `tree_map` makes of a teacher lie apart,
    # and are copied into one flat for the gathers
    assert program_peak(distillation(lambda tree: tree), deep, frozen_deep) <= 2 * PIECES + 3.5
    # The measure sees a teacher that is gathered at once
    assert program_peak(distillation(unshard), deep, frozen_deep) >= DEPTH
