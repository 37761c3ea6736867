"""`optim.compiled`: the numbers of the operators, on donated storage, at every level."""

import pytest
import torch
from torch._guards import CompileContext

from functorch_zero import optim
from functorch_zero.errors import TransformError
from functorch_zero.groups import launch
from functorch_zero.groups.single import SingleRank
from functorch_zero.optim.kernels import compiled
from functorch_zero.sharded.api import shard
from functorch_zero.step.program import unshard
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.tiers import THOROUGH, tiers


def loss_fn(params, buffers, batch):
    parts = unshard(params).values()
    return sum(((p.reshape(-1, 1) - batch["x"]) ** 2 * (k + 1)).mean() for k, p in enumerate(parts))


def own_chain(count_scale=0.5):
    """What torch has no kernel for: decay by a schedule, momentum that is a signed square root,
    clipped."""

    def init(params):
        return {"speed": optim.base.tree_zeros_like(params), "count": optim.base.step_count()}

    def update(updates, state, params):
        speed = optim.base.tree_map(lambda m, u: 0.9 * m + 0.1 * u, state["speed"], updates)
        scale = 1 / (1 - 0.9 ** (state["count"] + 1).double())
        made = optim.base.tree_map(lambda m: m.sign() * (m * scale).abs().sqrt(), speed)
        return made, {"speed": speed, "count": state["count"] + 1}

    schedule = optim.exponential_decay(0.1, 1, count_scale)
    return optim.chain(
        optim.pointwise(init, update), optim.clip(1.0), optim.scale_by_learning_rate(schedule)
    )


def params_of(dtype):
    torch.manual_seed(0)
    shapes = {"a": (7, 5), "b": (3,), "c": ()}
    return {
        name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()
    }


def check_levels(cases):
    """The number of kernels that were made for these (count scale, levels)."""
    made, backend = set(), compiled._backend
    # torch starts over with one whose numbers it does not find in inductor's cache on the disk:
    # that is no other kernel
    compiled._backend = lambda *args: (
        made.add(CompileContext.current_compile_id()) or backend(*args)
    )
    batches = [{"x": torch.randn(6, dtype=torch.float64)} for _ in range(3)]
    for scale, levels in cases:
        optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.compiled(own_chain(scale)))
        step = train_step(loss_fn, optimizer)
        # The kernel is made here, which may take longer than ranks have for all of their work
        alone = shard(step, level=levels[0], group=SingleRank())
        alone(alone.init(params_of(torch.float64), {}), batches[0])
        assert_sharded_equals_unsharded(
            step, params_of(torch.float64), {}, batches, levels=levels, ranks=(1, 2)
        )
    return len(made)


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize(
    "cases", tiers(thorough=[[(0.5, (3,))], [(0.5, (0, 1, 3)), (0.75, (2,))]]), ids=len
)
def test_a_compiled_chain_is_the_chain_at_every_level(cases):
    once_per_chain = [len(cases)]  # for all levels, ranks and sizes
    # It leaves threads behind
    assert launch(check_levels, 1, cases, start_method="fork", timeout=100) == once_per_chain


def handing_on(new):
    """A chain whose state becomes what `new` makes of updates, state and params, all of them handed
    on as they are."""
    tree_map = optim.base.tree_map

    def init(params):
        return {"a": optim.base.tree_zeros_like(params), "b": tree_map(torch.ones_like, params)}

    def update(updates, state, params):
        made = tree_map(
            lambda u, a, b, p: u + 0.1 * a - 0.2 * (b - p), updates, state["a"], state["b"], params
        )
        return made, new(updates, state, params)

    return optim.chain(optim.pointwise(init, update), optim.scale(-0.1))


HANDED_ON = {
    "two updates": lambda updates, state, params: {"a": updates, "b": state["a"]},
    "swapped": lambda updates, state, params: {"a": state["b"], "b": state["a"]},
    "params": lambda updates, state, params: {
        "a": params,
        "b": optim.base.tree_map(torch.clone, params),
    },
    "params later": lambda updates, state, params: {"a": state["b"], "b": params},
}


def run_handing_on():
    batches, params = (
        [{"x": torch.linspace(-1, k, 6)} for k in (1, 2, 3, 4)],
        params_of(torch.float64),
    )
    apart = {}
    for name, new in HANDED_ON.items():
        chain = handing_on(new)
        steps = [
            shard(train_step(loss_fn, t), level=0, group=SingleRank())
            for t in (chain, optim.compiled(chain))
        ]
        states = [step.init(params) for step in steps]
        for batch in batches:
            states = [step(state, batch)[0] for step, state in zip(steps, states, strict=True)]
        pairs = zip(
            *(torch.utils._pytree.tree_leaves([s.params, s.opt_state]) for s in states), strict=True
        )
        apart[name] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return apart


@THOROUGH
@pytest.mark.usefixtures("cpp_compiler")
def test_a_state_may_be_what_the_update_was_given():
    (apart,) = launch(run_handing_on, 1, start_method="fork", timeout=100)
    assert apart.keys() == HANDED_ON.keys() and max(apart.values()) < 1e-12, apart


def test_it_runs_only_on_donated_storage_and_with_a_compiler(monkeypatch):
    def never(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr(compiled, "_backend", never)
    step = train_step(loss_fn, optim.compiled(own_chain()))
    batch, params = {"x": torch.ones(2)}, params_of(torch.float32)
    keeping = shard(step, level=0, group=SingleRank(), donate=False)
    expected, _ = keeping(keeping.init(params), batch)
    monkeypatch.setattr(compiled, "can_compile", lambda device: False)
    without = shard(step, level=0, group=SingleRank(), donate=True)
    got, _ = without(without.init(params), batch)
    assert all(
        (got.params[name] != leaf).all() and torch.equal(got.params[name], expected.params[name])
        for name, leaf in params.items()
    )


def test_what_is_not_pointwise_is_refused():
    for transform in (optim.lamb(0.1), optim.masked(optim.sgd(0.1), lambda path, leaf: True)):
        with pytest.raises(TransformError, match="compiled takes pointwise"):
            optim.compiled(transform)
