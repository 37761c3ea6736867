"""A mesh with an axis along which all ranks have the same part of the batch: equal to the unsharded
step on the parts there are, and to nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from optree import tree_leaves
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import MismatchError
from functorch_zero.groups import CountingGroup, HybridGroup, counted, run_ranks
from functorch_zero.groups.mesh import Copy, axes_of
from functorch_zero.testing import Equality, assert_sharded_equals_unsharded
from tests.means import average, average_with_flags
from tests.sharded.test_processes import on_processes
from tests.tiers import THOROUGH, thinned, tiers

SameData = Literal["replicate", "shard"]
LEVELS = (0, 1, 2, 3)
ROWS = 24  # of a batch
MESHES: list[tuple[int, int, SameData]] = [  # ranks, of them along the shard axis, the same data
    (4, 2, "replicate"),
    (4, 2, "shard"),
    (2, 1, "replicate"),
    (2, 2, "shard"),
    (6, 2, "replicate"),
    (6, 3, "shard"),
]


def build(
    model_options: dict[str, Any] | None = None, *, weighted: bool = True, **options: Any
) -> tuple[fz.TrainStep, Any, Any]:
    """BatchNorm, dropout, a metric and, unless told otherwise, weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)
        )
        apply, params, buffers = fz.functionalize(model.double(), **model_options or {})

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        y, buffers = apply(params, buffers, x)
        loss = (y - x[:, :3]).square().mean()
        metrics = {"size": y.detach().abs().mean()}
        weight = 1 + x[:, 0].abs().sum() if weighted else None
        return loss, fz.Aux(metrics=metrics, buffers=buffers, weight=weight)

    options.setdefault("metrics", ["grad_norm"])
    return fz.train_step(loss_fn, optim.adamw(0.01), **options), params, buffers


def make_batches(num: int = 3, rows: int = ROWS) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=g, dtype=torch.float64) for _ in range(num)]


@pytest.mark.parametrize(
    ("mesh", "over", "levels"),
    tiers(
        [(MESHES[0], "both", [3])],
        [
            (MESHES[0], "both", [0, 1, 2]),
            (MESHES[4], "both", LEVELS),
            *((mesh, ("shard", "both")[i % 2], LEVELS) for i, mesh in enumerate(MESHES)),
        ],
        [(mesh, over, LEVELS) for mesh in MESHES for over in ("shard", "both")],
        rows=True,
    ),
)
@pytest.mark.parametrize("sync", tiers(["mean"], ["rank0", "local"]))
def test_equals_the_unsharded_step(
    mesh: tuple[int, int, SameData], over: str, levels: Sequence[int], sync: Any
) -> None:
    ranks, shard_size, same_data = mesh
    step, params, buffers = build(accumulate=2)
    assert_sharded_equals_unsharded(
        step,
        params,
        buffers,
        make_batches(),
        levels=levels,
        ranks=(ranks,),
        per_rank=True,
        shard_size=shard_size,
        same_data=same_data,
        state_axes=over,
        sync_buffers=sync,
    )


@pytest.mark.parametrize(("ranks", "shard_size", "same_data"), thinned(MESHES[:2], rows=True))
@pytest.mark.parametrize(
    "options", thinned([{"nonfinite": "skip"}, {"loss_scale": fz.LossScale(2.0**10, interval=1)}])
)
def test_steps_that_are_not_finite(
    ranks: int, shard_size: int, same_data: SameData, options: dict[str, Any]
) -> None:
    step, params, buffers = build(weighted=False, **options)
    batches = make_batches()
    batches[1][-1, 3] = float("inf")  # in the last part
    assert_sharded_equals_unsharded(
        step,
        params,
        buffers,
        batches,
        levels=(0, 3),
        ranks=(ranks,),
        per_rank=True,
        shard_size=shard_size,
        same_data=same_data,
    )


@pytest.mark.parametrize("same_data", tiers(thorough=["replicate", "shard"]))
def test_three_parts_in_mixed_precision_recomputed(same_data: SameData) -> None:
    """Their share of the mean is no power of two, and not in the loss's seed."""
    single = fz.Precision(compute=torch.float32, output=torch.float64)
    low = {nn.Linear: single, nn.Dropout: single}
    model = {"units": nn.Linear, "precision": low, "remat": True}
    step, params, buffers = build(model, weighted=False)
    assert_sharded_equals_unsharded(
        step,
        params,
        buffers,
        make_batches(),
        levels=(1, 3),
        ranks=(6,),
        per_rank=True,
        grade=Equality("approximate", 1e-4, "a forward and a backward in float32"),
        shard_size=3 if same_data == "replicate" else 2,
        same_data=same_data,
    )


def without_noise() -> tuple[fz.TrainStep, Any, Any]:
    """A loss that is the mean over the rows, so that the parts' mean is that of the whole."""
    params = build()[1]

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        y = x @ params["0.weight"].T @ params["3.weight"].T + params["3.bias"]
        return (y - x[:, :3]).square().mean()

    step = fz.train_step(loss_fn, optim.adamw(0.01), trainable=lambda path, leaf: path[0] in "03")
    return step, params, {}


def mesh_and_part(group: Any, same_data: Any, x: Tensor) -> tuple[HybridGroup, Tensor]:
    """Two by two ranks, and this rank's rows."""
    mesh = HybridGroup(group, shard_size=2, same_data=same_data)
    return mesh, x.chunk(mesh.data.size)[mesh.data.rank]


BOTH_AXES: tuple[SameData, ...] = ("replicate", "shard")


@THOROUGH
def test_on_processes() -> None:
    """Also evaluation."""
    batches = make_batches(2)

    def run(group: Any) -> list[Any]:
        found = []
        step, params, buffers = without_noise()
        evaluation = fz.eval_step(lambda p, b, x: {"loss": step.loss_fn(p, b, x)})
        for same_data in BOTH_AXES:
            mesh, _ = mesh_and_part(group, same_data, batches[0])
            sharded = fz.shard(step, level=3, group=mesh, state_axes="both")
            evaluate = fz.shard(evaluation, level=3, group=mesh, state_axes="both")
            state = sharded.init(params, buffers)
            for x in batches:
                part = mesh_and_part(group, same_data, x)[1]
                state, metrics = sharded(state, part)
            after = evaluate(state, part)
            found.append((sharded.unshard(state).params, metrics["loss"], after["loss"]))
        return found

    step, params, buffers = without_noise()
    state = step.init(params, buffers)
    for x in batches:
        state, metrics = step(state, x)
    after = step.loss_fn(state.params, buffers, x)
    for got, loss, loss_after in (one for found in on_processes(run, 4) for one in found):
        for path, leaf in state.params.items():
            torch.testing.assert_close(got[path], leaf.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(loss, metrics["loss"])
        torch.testing.assert_close(loss_after, after.detach())


@pytest.mark.parametrize("same_data", thinned(BOTH_AXES))
def test_a_checkpoint_is_of_any_mesh(tmp_path: Any, same_data: SameData) -> None:
    def run(group: Any) -> Any:
        step, params, buffers = build()
        mesh, part = mesh_and_part(group, same_data, make_batches(1)[0])
        sharded = fz.shard(step, level=3, group=mesh)
        state, _ = sharded(sharded.init(params, buffers), part)
        checkpoint.save(tmp_path, sharded, state)
        other = fz.shard(step, level=2, group=group)
        loaded = checkpoint.load(tmp_path, other, like=other.init(params, buffers)).state
        return sharded.unshard(state), other.unshard(loaded)

    for saved, loaded in run_ranks(run, 4):
        assert all(map(torch.equal, tree_leaves(saved.value), tree_leaves(loaded.value)))


def wrong_part(rank: int, mesh: HybridGroup, x: Tensor) -> Tensor:
    """Every rank of the mesh takes a part of its own."""
    return x.chunk(4)[rank]


def parts_change_places(rank: int, mesh: HybridGroup, x: Tensor) -> Tensor:
    """The second copies of both parts: a sum over ranks doesn't notice."""
    return x.chunk(2)[mesh.data.rank if axes_of(mesh).copy.number == 0 else 1 - mesh.data.rank]


@pytest.mark.parametrize(
    ("ranks_are", "choose"),
    tiers(
        [("threads", wrong_part)],
        [
            ("threads", parts_change_places),
            ("processes", parts_change_places),
            ("processes", wrong_part),
        ],
        rows=True,
    ),
)
@pytest.mark.parametrize("same_data", thinned(BOTH_AXES, 2))
def test_other_batches_are_found_before_anything_is_written(
    ranks_are: str, choose: Any, same_data: SameData
) -> None:
    x = make_batches(1)[0]

    def run(group: Any) -> Any:
        step, params, buffers = without_noise()
        mesh, part = mesh_and_part(group, same_data, x)
        sharded = fz.shard(step, level=3, group=mesh)
        state = sharded.init(params, buffers)
        with pytest.raises(MismatchError) as caught:
            sharded(state, choose(group.rank, mesh, x))
        state, metrics = sharded(state, part)  # the same state
        return str(caught.value), metrics["loss"]

    step, params, buffers = without_noise()
    _, expected = step(step.init(params, buffers), x)
    second = 2 if same_data == "replicate" else 1  # the rank beside rank 0
    told = run_ranks(run, 4) if ranks_are == "threads" else on_processes(run, 4)
    for text, loss in told:
        assert f"ranks 0 and {second} should have the same data, part 0 of the batch" in text
        assert "found another loss" in text and "mesh.data.rank" in text
        torch.testing.assert_close(loss, expected["loss"])


def test_a_rank_that_draws_other_random_numbers_is_found() -> None:
    x = make_batches(1)[0]

    def run(group: Any) -> str:
        step, params, buffers = without_noise()
        own = torch.Generator().manual_seed(group.rank)

        def noisy(params: Any, buffers: Any, x: Tensor) -> Any:
            noise = torch.randn(x.shape, generator=own, dtype=x.dtype)
            return step.loss_fn(params, buffers, x + noise)

        mesh, part = mesh_and_part(group, "replicate", x)
        noisy_step = fz.train_step(noisy, step.optimizer, trainable=step.trainable["params"])
        sharded = fz.shard(noisy_step, level=2, group=mesh)
        with pytest.raises(MismatchError) as caught:
            sharded(sharded.init(params, buffers), part)
        return str(caught.value)

    assert all("random numbers from the state's seed" in text for text in run_ranks(run, 4))


def test_metrics_and_weights_of_copies() -> None:
    """Each part counts once; what differs between copies is named."""

    def run(group: Any) -> Any:
        copy = Copy(data=group.rank % 2, number=group.rank // 2, num=3)
        weight = 1.0 + copy.data
        numbers, flags = {"a": float(copy.data)}, [group.rank == 5]
        whole, raised = average_with_flags(numbers, weight, group, (), flags, copy)
        assert raised == [True]
        told = []
        for other in ({"a": 0.0 + group.rank}, {"a": -0.0 if group.rank > 3 else 0.0}):
            with pytest.raises(MismatchError, match="found another a") as caught:
                average(other, weight, group, copy=copy)
            told.append(str(caught.value))
        with pytest.raises(MismatchError, match="found another weight of its batch"):
            average({"a": 0.0}, 1.0 + (group.rank == 4), group, copy=copy)
        nan = average({"a": float("nan")}, weight, group, copy=copy)
        return whole, told, nan

    for whole, told, nan in run_ranks(run, 6):
        assert float(whole.metrics["a"]) == pytest.approx(2 / 3)
        assert (float(whole.weight), whole.num_weighty) == (3.0, 2)
        assert "ranks 0 and 2" in told[0] and "ranks 0 and 4" in told[1]
        assert nan.metrics["a"].isnan()


def test_the_data_axis() -> None:
    group = CountingGroup(4, rank=3)
    plain = HybridGroup(group, shard_size=2)
    assert plain.data is plain and axes_of(plain).data is plain and axes_of(group).data is group
    assert axes_of(plain).copy == Copy(data=3, number=0, num=1)
    of_replicas = HybridGroup(group, shard_size=2, same_data="replicate")
    assert of_replicas.data is of_replicas.shard
    assert axes_of(of_replicas).copy == Copy(data=1, number=1, num=2)
    of_shards = HybridGroup(CountingGroup(6, rank=4), shard_size=3, same_data="shard")
    assert of_shards.data is of_shards.replicate
    assert axes_of(of_shards).copy == Copy(data=1, number=1, num=3)
    one_copy = HybridGroup(group, shard_size=4, same_data="replicate")
    assert one_copy.data is one_copy, "an axis of one rank has no copies"
    only_copies = HybridGroup(group, shard_size=1, same_data="replicate")
    assert only_copies.data.size == 1 and axes_of(only_copies).copy == Copy(0, 3, 4)
    with pytest.raises(ValueError, match=r"same_data must be one of .*got 'data'"):
        HybridGroup(group, shard_size=2, same_data="data")  # type: ignore[arg-type]


def test_ranks_must_name_the_same_axis() -> None:
    def run(group: Any) -> None:
        step, params, buffers = build()
        mesh = HybridGroup(group, shard_size=2, same_data=BOTH_AXES[group.rank % 2])
        with pytest.raises(MismatchError, match="axis of the same data"):
            fz.shard(step, level=3, group=mesh).init(params, buffers)

    run_ranks(run, 4)


@THOROUGH
def test_equal_gradients_are_not_sent() -> None:
    """Along the axis of the same data: one slice each, and no collective."""
    meshes = [(None, "shard"), *((axis, over) for axis in BOTH_AXES for over in ("shard", "both"))]

    def run(group: Any) -> list[Counter[str]]:
        found = []
        for same_data, over in meshes:
            watched = counted(group)
            step, params, buffers = without_noise()
            mesh, part = mesh_and_part(watched, same_data, make_batches(1)[0])
            sharded = fz.shard(step, level=2, group=mesh, state_axes=over)
            state = sharded.init(params, buffers)
            watched.reset()
            sharded(state, part)
            found.append(Counter(call.kind for call in watched.calls))
        return found

    # Values and words; and where ranks have the same data, digests of what they found
    buckets, agreement, compared = 2, 2, 3
    expected: list[tuple[int, int, int]] = [  # reduce-scatters, all-reduces and all-gathers
        (buckets, buckets + agreement, buckets),
        (buckets, compared, buckets),  # replicas have equal gradients
        (buckets, compared, 2 * buckets),
        (0, buckets + compared, buckets),  # pieces are slices, summed over replicas
        (buckets, compared, 2 * buckets),
    ]
    for found in run_ranks(run, 4):
        kinds = ("reduce_scatter", "all_reduce", "all_gather")
        assert [tuple(calls[kind] for kind in kinds) for calls in found] == expected
        # A first step compares the units that losses use
        assert all(set(calls) <= {*kinds, "exchange"} for calls in found)
        assert all(calls["exchange"] == 1 for calls in found)
