"""A pure transform may keep what it was given, or hand it on: donated storage must not change under
it."""

import pytest
import torch
from optree import tree_map

from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded, models
from functorch_zero.testing.strategies import public_functions
from tests.tiers import crossed, thinned, tiers


def zeros(params):
    return tree_map(torch.zeros_like, params)


def two_zeros(params):
    return zeros(params), zeros(params)


def keeps_params(constructor):
    def update(updates, state, params, across):
        return tree_map(lambda u, s: u + 0.01 * s, updates, state), tree_map(lambda p: p, params)

    return constructor(zeros, update)


def keeps_updates(constructor):
    def update(updates, state, params, across):
        return tree_map(lambda u, s: u + 0.5 * s, updates, state), updates

    return constructor(zeros, update)


def hands_on_updates_it_keeps(constructor):
    def update(updates, state, params, across):
        older, newer = state
        return updates, (tree_map(lambda o, n: o + n, older, newer), updates)

    return constructor(two_zeros, update)


def swaps_its_state(constructor):
    def update(updates, state, params, across):
        newest, oldest = state
        return tree_map(lambda u, o: u + 0.3 * o, updates, oldest), (updates, newest)

    return constructor(two_zeros, update)


def hands_on_its_state(constructor):
    def update(updates, state, params, across):
        mean = tree_map(lambda u, s: u + 0.5 * s, updates, state)
        return mean, mean

    return constructor(zeros, update)


def hands_on_params(constructor):
    def update(updates, state, params, across):
        return params, tree_map(lambda u, s: u + s, updates, state)

    return constructor(zeros, update)


AUTHORS = [
    keeps_params,
    keeps_updates,
    hands_on_updates_it_keeps,
    swaps_its_state,
    hands_on_its_state,
    hands_on_params,
]


def swaps_its_state_in_place():
    """Each result lies where another one belongs."""

    def in_place(updates, state, params):
        newest, oldest = state
        return tree_map(lambda u, o: o.mul_(0.3).add_(u), updates, oldest), (updates, newest)

    return optim.pointwise(
        two_zeros, lambda u, s, p: swaps_its_state(update_of)(u, s, p, None), in_place=in_place
    )


def update_of(init, update):
    return update


def whole_leaf_keeps_update():
    def update(update, state):
        return update + 0.5 * state, update

    return optim.with_whole_leaves(torch.zeros_like, update)


def loss_fn(params, buffers, batch):
    return sum(((p - batch) ** 2).mean() * (k + 1) for k, p in enumerate(params.values()))


def whole_tree(init, update):
    return optim.with_whole_tree(
        init, lambda updates, state, params: update(updates, state, params, None)
    )


CONSTRUCTORS = (optim.pointwise, optim.with_statistics, whole_tree)
TRANSFORMS = [author(make) for author in AUTHORS for make in CONSTRUCTORS]


@pytest.mark.parametrize(
    ("ranks", "mask"),
    tiers([(2, lambda path, leaf: leaf.ndim > 1)], [(1, None), (2, None)], rows=True),
)
@pytest.mark.parametrize("levels", tiers([(0, 3)], [(1, 2)]), ids=str)
@pytest.mark.parametrize(
    "kept", thinned([*TRANSFORMS, whole_leaf_keeps_update(), swaps_its_state_in_place()], 12)
)
def test_donation_does_not_change_what_a_transform_keeps(kept, levels, ranks, mask):
    torch.manual_seed(0)
    params = {
        k: torch.randn(s, dtype=torch.float64).requires_grad_()
        for k, s in {"a": (5, 3), "b": (4,)}.items()
    }
    batches = [torch.tensor(0.1 * k, dtype=torch.float64) for k in range(4)]
    last = (
        optim.ema(0.9),
        optim.with_statistics(zeros, pass_on),
        optim.scale_by_learning_rate(0.1),
    )
    step = train_step(loss_fn, optim.chain(kept, optim.add_decayed_weights(0.1, mask), *last))
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, batch)

    def on_a_rank(group):
        for level in levels:
            sharded = shard(step, level=level, group=group, donate=True)
            own = sharded.init(params)
            for k, batch in enumerate(batches):
                # Each leaf by itself, once
                own, _ = sharded(own if k != 2 else tree_map(torch.clone, own), batch)
            whole = sharded.unshard(own)
            for tree, expected in (
                (whole.params, state.params),
                (whole.opt_state, state.opt_state),
            ):
                tree_map(
                    lambda x, y: torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14),
                    tree,
                    expected,
                )

    run_ranks(on_a_rank, ranks)


def keeps_a_mean_twice():
    """At every third step, one tensor is both the mean and the mean kept for later steps."""

    def init(params):
        return zeros(params), zeros(params), torch.zeros((), dtype=torch.int64)

    def update(updates, state, params):
        mean, kept, count = state
        mean = tree_map(lambda m, u: 0.9 * m + u, mean, updates)
        kept = mean if int(count) % 3 == 2 else kept
        return tree_map(lambda u, k: u + k, updates, kept), (mean, kept, count + 1)

    return optim.pointwise(init, update)


@pytest.mark.parametrize("ranks", tiers([2], [1]))
@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_results_that_share_storage_are_not_written_over_each_other(level, ranks):
    torch.manual_seed(0)
    params = {
        k: torch.randn(s).double().requires_grad_() for k, s in {"a": (5, 3), "b": (4,)}.items()
    }
    batches = [torch.tensor(0.1 * k, dtype=torch.float64) for k in range(5)]
    # The first part's updates are new tensors, and lie in no flat
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), keeps_a_mean_twice(), optim.scale(-0.1))
    step = train_step(loss_fn, optimizer)
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, batch)

    def on_a_rank(group):
        sharded = shard(step, level=level, group=group)
        own = sharded.init(params)
        for k, batch in enumerate(batches):
            # A state that its owner has mapped lies in no flat either
            own, _ = sharded(own if k != 2 else tree_map(torch.clone, own), batch)
        whole = sharded.unshard(own)

        def close(x, y):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)

        tree_map(close, whole.params, state.params)
        tree_map(close, whole.opt_state, state.opt_state)

    run_ranks(on_a_rank, ranks)


@pytest.mark.parametrize("name", ("kernel", "chain", "masked"))
@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_moments_that_share_elements_are_not_written_over_each_other(level, name):
    """A state whose owner has put views of one tensor in the place of both moments."""
    optimizer = {
        "kernel": optim.adamw(0.1),
        "chain": optim.chain(optim.scale_by_adam(), optim.scale(-0.1)),
        "masked": optim.masked(optim.adamw(0.1), lambda path, leaf: path == "a"),
    }[name]
    torch.manual_seed(0)
    params = {k: torch.randn(64, dtype=torch.float64, requires_grad=True) for k in "ab"}
    if name != "masked":  # one leaf is all of its flat; masked, each leaf is a flat
        del params["b"]
    batches = [torch.tensor(0.1 * k, dtype=torch.float64) for k in range(4)]

    def run(step):
        state = step.init(params)
        for k, batch in enumerate(batches):
            if k == 1:
                shared = {}  # by shape

                def put(x, shared=shared):
                    ones = shared.setdefault(x.shape, torch.ones_like(x))
                    return ones.detach() if x.dim() else x

                state = state.replace(opt_state=tree_map(put, state.opt_state))
            state, _ = step(state, batch)
        return state

    step = train_step(loss_fn, optimizer)
    expected = run(step)

    def on_a_rank(group):
        sharded = shard(step, level=level, group=group)
        whole = sharded.unshard(run(sharded))
        for k, x in whole.params.items():
            torch.testing.assert_close(x, expected.params[k], rtol=1e-12, atol=1e-14)

    run_ranks(on_a_rank, 2)


def pass_on(updates, state, params, across):
    return tree_map(lambda u: u * 1.5, updates), state


@pytest.mark.parametrize(
    ("name", "seed"), crossed(["muon", "soap", "full_matrix_adagrad"], range(3), n=3, quick=1)
)
def test_what_owners_send_back_is_not_taken_for_a_bucket(name, seed):
    """The received pieces once lay in a buffer that had a bucket's size, and padding there was
    another leaf."""
    case = models.convnet(3, 2, 2, 5, seed)
    step, params, buffers = case.step(public_functions()[name](0.01), weighted=True)
    batches = case.batches(2, 6, seed)
    options = {"levels": (1, 2), "ranks": (3,), "per_rank": True, "allow_round_off": name != "muon"}
    assert_sharded_equals_unsharded(step, params, buffers, batches, **options)
