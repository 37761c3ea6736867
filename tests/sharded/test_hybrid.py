"""HSDP: a mesh of two axes, pieces inside the shard axis, copies along the other. Equal to the
unsharded step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from optree import tree_leaves
from torch import nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import GroupError, PeerError, StructureError
from functorch_zero.groups import (
    CheckedGroup,
    CountingGroup,
    HybridGroup,
    ProcessGroup,
    counted,
    run_ranks,
)
from functorch_zero.groups.mesh import Reordered, axes_of
from functorch_zero.layout.build import make_layout
from functorch_zero.runtime.reduce import GradientReduction
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from functorch_zero.testing import strategies as fst
from tests.compare import Run, assert_equal_updates, assert_same_on_all_ranks, train, train_sharded
from tests.local import local_leaves
from tests.models import ZOO, Shared, even, uneven
from tests.runtime.test_skipped_units import some_rows_reach, with_negative_half
from tests.runtime.test_unit import batches_of
from tests.runtime.test_unit import build as build_module
from tests.sharded.test_parts import ADAPTERS, BASE, build, make_batches, some_levels
from tests.sharded.test_processes import OPTIMIZERS, on_processes
from tests.tiers import THOROUGH, drawn, thinned, tiers

LEVELS = (0, 1, 2, 3)


@drawn(data=st.data(), quick=1)
def test_any_mesh_any_level_any_optimizer(data: Any) -> None:
    case = data.draw(fst.modules())
    shard_size, replicas = data.draw(st.sampled_from([(2, 2), (1, 2), (2, 1), (3, 2), (2, 3)]))
    ranks = shard_size * replicas
    optimizer = data.draw(
        fst.optimizers(["adamw", "clip + lamb", "adafactor", "muon", "lbfgs", "sm3"])
    )
    step, params, buffers = case.step(optimizer.make(), weighted=True)
    accumulate = data.draw(st.sampled_from([1, 1, 2])) if not case.per_rank else 1
    step = fz.train_step(step.loss_fn, step.optimizer, accumulate=accumulate)
    level = data.draw(st.sampled_from([*LEVELS, "several"]))
    batches = [
        b
        for b in case.batches(
            2, 2 * accumulate * ranks * case.min_rows, data.draw(st.integers(0, 99))
        )
    ]
    assert_sharded_equals_unsharded(
        step,
        params,
        buffers,
        batches,
        levels=(some_levels(7) if level == "several" else level,),
        ranks=(ranks,),
        per_rank=case.per_rank,
        unused=case.unused,
        shard_size=shard_size,
        same_data=data.draw(st.sampled_from([None, "replicate", "shard"])),
        donate=data.draw(st.booleans()),
        state_axes=data.draw(st.sampled_from(["shard", "both"])),
        reduce_gradients=data.draw(st.sampled_from([None, "once"])),
        allow_round_off=True,
    )


CHOSEN = [("gpt", "clip+lamb"), ("gpt", "muon"), ("scalars", "adamw")]
CASES = [(*pair, level, over) for pair in CHOSEN for level in (1, 3) for over in ("shard", "both")]
IN_TURN = [case for i, case in enumerate(CASES) if (i + i // 2 + i // 4) % 2]


@pytest.mark.parametrize(
    ("as_mesh", "cases"),
    tiers(
        thorough=[(True, CASES[2::8]), (False, IN_TURN)],
        full=[(True, CASES[8:]), (False, [case for case in CASES if case not in IN_TURN])],
        rows=True,
    ),
    ids=["mesh-few", "plain", "mesh", "plain-more"],
)
def test_on_processes(as_mesh: bool, cases: list[Any]) -> None:

    def run(group: Any) -> list[Run]:
        mesh: Any = HybridGroup(group, shard_size=2)
        if as_mesh:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = fz.shard(
                fz.eval_step(dict), level=0, group=init_device_mesh("cpu", (2, 2))
            ).group
            assert isinstance(mesh, HybridGroup) and (mesh.rank, mesh.shard.rank) == (
                group.rank,
                group.rank % 2,
            )
        found = []
        for name, optimizer, level, over in cases:
            loss_fn, params, buffers = ZOO[name].build(weighted=True)
            step, batches = (
                fz.train_step(loss_fn, OPTIMIZERS[optimizer]()),
                ZOO[name].batches(2, 12),
            )
            found.append(
                train_sharded(
                    mesh,
                    step,
                    params,
                    buffers,
                    batches,
                    uneven(12, 4),
                    level=level,
                    state_axes=over,
                )
            )
        return found

    runs = on_processes(run, 4)
    for i, (name, optimizer, _, _) in enumerate(cases):
        loss_fn, params, buffers = ZOO[name].build(weighted=True)
        step, batches = fz.train_step(loss_fn, OPTIMIZERS[optimizer]()), ZOO[name].batches(2, 12)
        assert_same_on_all_ranks([r[i] for r in runs])
        assert_equal_updates(train(step, params, buffers, batches), runs[0][i])


def test_what_a_rank_holds_and_sends() -> None:
    """Level 3 on 2 replicas of 3 ranks, AdamW, all trained; in units of the padded params'
    bytes."""

    def run(group: Any) -> dict[str, Any]:
        found = {}
        for over in ("shard", "both"):
            watched = counted(group)
            step, params, buffers = build(trainable=lambda path, leaf: True)
            mesh = HybridGroup(watched, shard_size=3)
            sharded = fz.shard(
                step, level=3, group=mesh, state_axes=over, reshard_after_forward=False
            )
            state = sharded.init(params, buffers)
            size = sum(b.numel * 8 for b in state.sharding.layout.buckets)
            held = [
                sum(leaf.numel() for leaf in local_leaves(t) if leaf.dim()) * 8
                for t in (state.params, state.opt_state)
            ]
            watched.reset()
            sharded(
                state, {k: x.tensor_split(6)[group.rank] for k, x in make_batches(1)[0].items()}
            )
            calls = [c for c in watched.calls if c.sent_bytes > 1000]
            sent = {
                kind: sum(c.sent_bytes for c in calls if c.kind == kind) / size
                for kind in {c.kind for c in calls}
            }
            found[over] = held, sent
        return found

    by_rank = run_ranks(run, 6)
    whole = BASE + ADAPTERS
    for over, replicas in (("shard", 2), ("both", 1)):
        params, moments = zip(*(found[over][0] for found in by_rank), strict=True)
        assert sum(params) == 2 * whole and sum(moments) == 2 * replicas * whole
        for found in by_rank:
            sent = found[over][1]
            # The shard axis: one gather, one reduction
            along = {
                "all_gather": 2 / 3,
                "reduce_scatter": 2 / 3,
            }
            if over == "shard":  # an all-reduce of a third over 2 replicas
                assert sent == pytest.approx(along | {"all_reduce": 2 * (1 / 3) / 2})
            else:  # a reduce-scatter and an all-gather of a third
                assert sent == pytest.approx(
                    {kind: volume + (1 / 3) / 2 for kind, volume in along.items()}
                )


def test_replicas_are_summed_once_a_step_when_accumulating() -> None:
    def run(group: Any) -> int:
        watched = counted(group)
        step, params, buffers = build(trainable=lambda path, leaf: True)
        step = fz.train_step(
            step.loss_fn, step.optimizer, trainable=step.trainable["params"], accumulate=3
        )
        sharded = fz.shard(step, level=3, group=HybridGroup(watched, shard_size=2))
        state = sharded.init(params, buffers)
        watched.reset()
        sharded(state, make_batches(1)[0])
        return watched.num_calls("all_reduce")

    units, metrics, words = 4, 1, 1
    assert run_ranks(run, 4) == [units + metrics + words] * 4


def test_gradients_that_come_after_the_last_ones_are_summed_apart() -> None:
    """A custom function's backward may bring them, when the bucket's sum is on its way already."""
    group = counted(CountingGroup(4))
    axes = axes_of(HybridGroup(group, shard_size=2))
    layout = make_layout({"w": torch.empty(64)}, 2, trainable=lambda path, leaf: True)
    reduction = GradientReduction(layout, axes, [])
    for value in (1.0, 2.0):
        reduction.make_room(1, [0])
        reduction.start(0, torch.full((64,), value), is_last=True)
    sums = reduction.finish()
    assert [*sums] == [0] and torch.equal(sums[0], torch.full((32,), 4 * (1.0 + 2.0)))
    kinds = [call.kind for call in group.calls]
    assert kinds == ["reduce_scatter", "all_reduce", "reduce_scatter", "all_reduce"]


@THOROUGH
def test_a_checkpoint_holds_each_element_once(tmp_path: Any) -> None:
    def run(group: Any) -> Any:
        step, params, buffers = build(optim.muon(0.02), trainable=lambda path, leaf: True)
        mesh = HybridGroup(group, shard_size=2)
        state, states = None, []
        for over in ("shard", "both"):
            sharded = fz.shard(step, level=3, group=mesh, state_axes=over)
            if state is None:
                state = sharded.init(params, buffers)
                state, _ = sharded(state, make_batches(1)[0])
                states.append(sharded.unshard(state))
                checkpoint.save(tmp_path, sharded, state)
            state = checkpoint.load(tmp_path, sharded, like=sharded.init(params, buffers)).state
            states.append(sharded.unshard(state))
            checkpoint.save(tmp_path / over, sharded, state)
        flat = fz.shard(step, level=2, group=group)
        states.append(
            flat.unshard(
                checkpoint.load(tmp_path / "both", flat, like=flat.init(params, buffers)).state
            )
        )
        return states

    for expected, *others in run_ranks(run, 4):
        for other in others:
            assert all(
                torch.equal(a, b)
                for a, b in zip(tree_leaves(expected), tree_leaves(other), strict=True)
            )


def test_the_ranks_of_a_reordered_group() -> None:
    numbers = [2, 0, 3, 1]

    def run(group: Any) -> None:
        there = Reordered(group, numbers)
        n = numbers[group.rank]
        assert (there.rank, there.size) == (n, 4)
        out, piece = torch.empty(8), torch.full((2,), float(n))
        there.all_gather(out, piece).wait()
        assert out.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        part = torch.empty(1)
        there.reduce_scatter(part, torch.arange(4.0)).wait()
        assert part.item() == 4 * n
        source = torch.tensor([10.0 * n + to for to in range(4) for _ in range(to)])
        taken = torch.empty(4 * n)
        there.all_to_all(taken, [n] * 4, source, [0, 1, 2, 3]).wait()
        assert taken.tolist() == [10.0 * sender + n for sender in range(4) for _ in range(n)]
        word = torch.tensor([float(n)])
        there.broadcast(word, 3).wait()
        assert word.item() == 3
        assert there.exchange(bytes([n])) == [bytes([k]) for k in range(4)]

    run_ranks(run, 4)


def test_wrong_meshes_are_refused() -> None:
    step, _, _ = build()
    with pytest.raises(ValueError, match="must divide the number of ranks, 6"):
        HybridGroup(CountingGroup(6), shard_size=4)
    with pytest.raises(ValueError, match="two dims"):
        fz.shard(step, level=3, group=CountingGroup(4), state_axes="both")
    with pytest.raises(ValueError, match="state_axes must be one of"):
        fz.shard(step, level=3, group=CountingGroup(4), state_axes="replicate")
    with pytest.raises(TypeError, match="subgroup"):
        HybridGroup(Reordered(CountingGroup(4), [0, 1, 2, 3]), shard_size=2)
    with pytest.raises(ValueError, match="in increasing order"):
        run_ranks(lambda group: group.subgroup([1, 0]), 2)


def test_a_mesh_of_a_checked_group_is_checked() -> None:
    def run(group: Any) -> str:
        mesh = HybridGroup(CheckedGroup(group), shard_size=2)
        try:
            mesh.shard.all_reduce(torch.ones(2 + group.rank % 2)).wait()
        except GroupError as error:
            return str(error)
        return "nothing"

    assert all("the ranks called different collectives" in told for told in run_ranks(run, 4))
    with pytest.raises(TypeError, match="Reordered can't be divided"):
        HybridGroup(CheckedGroup(Reordered(CountingGroup(4), [0, 1, 2, 3])), shard_size=2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_state_of_another_mesh_is_refused(level: int) -> None:
    """Also where it has as many pieces, and this rank another of them."""
    step, params, buffers = build()
    (batch,) = make_batches(1)

    def run(group: Any) -> None:
        state = fz.shard(step, level=level, group=group).init(params, buffers)
        fz.shard(step, level=level, group=HybridGroup(group, shard_size=2), state_axes="both")(
            state, batch
        )

    with pytest.raises(
        StructureError, match=r"sharded for another.*mesh of 2 replicas of 2 ranks.*unshard it"
    ):
        run_ranks(run, 4)


def test_a_process_group_is_divided() -> None:
    def run(group: ProcessGroup) -> list[int]:
        half = group.subgroup((0, 2) if group.rank % 2 == 0 else (1, 3))
        sums = torch.tensor([group.rank, half.rank])
        half.all_reduce(sums).wait()
        return sums.tolist()

    assert on_processes(run, 4) == [[2, 1], [4, 1], [2, 1], [4, 1]]


PLACES: list[tuple[Any, bool, dict[str, Any]]] = [  # level, on a mesh, options
    ({"": 3, "head": 1, "between": 2}, False, {}),
    ({"": 3, "head": 0}, False, {"reduce_gradients": "once"}),
    (3, False, {"reduce_gradients": "once"}),
    (3, True, {}),
    ({"": 3, "head": 1}, True, {"state_axes": "both", "reduce_gradients": "once"}),
]


@THOROUGH
def test_ranks_whose_loss_does_not_reach_a_unit() -> None:
    """They start the others' collectives in the others' order all the same, wherever things lie."""
    batches = batches_of(with_negative_half)

    def step() -> Any:
        apply, params, buffers = build_module(Shared)
        return (
            fz.train_step(some_rows_reach(apply), optim.sgd(0.05, momentum=0.9), accumulate=2),
            params,
            buffers,
        )

    def run(group: Any) -> list[Run]:
        mesh = HybridGroup(group, shard_size=2)
        return [
            train_sharded(
                mesh if axes else group, *step(), batches, even(12, 4), level=level, **options
            )
            for level, axes, options in PLACES
        ]

    runs = on_processes(run, 4)
    expected = train(*step(), batches)
    for i in range(len(PLACES)):
        assert_same_on_all_ranks([r[i] for r in runs])
        assert_equal_updates(expected, runs[0][i])


@pytest.mark.parametrize("failing", tiers([4], [0, 1, 2, 3, 5]))
def test_replicas_that_are_a_step_behind_finish_it(failing: int) -> None:
    """A rank fails in a donating step. A replica that is in the step before, whose storage is
    written over by then, finishes it, so that all ranks try the same step again."""
    torch.manual_seed(0)
    apply, params, _ = fz.functionalize(
        nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2)
        ).double(),
        units=nn.Linear,
    )
    batches = [torch.randn(24, 5, dtype=torch.float64) for _ in range(3)]
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05, eps=1e-3))

    def step_with(fails: list[bool]) -> Any:
        def loss(params: Any, buffers: Any, x: Any) -> Any:
            if fails[0]:
                fails[0] = False
                raise ValueError("once")
            return apply(params, {}, x)[0].square().mean()

        return fz.train_step(loss, optimizer, accumulate=2)

    whole = step_with([False])
    expected = whole.init(params, {})
    for x in batches:
        expected, _ = whole(expected, x)

    def run(group: Any) -> Any:
        fails = [False]
        mesh = HybridGroup(group, shard_size=2)
        step = fz.shard(step_with(fails), level=1, group=mesh, donate=True)
        state = step.init(params, {})
        for i, x in enumerate(batches):
            fails[0] = i == 1 and group.rank == failing
            part = x.chunk(6)[group.rank]
            try:
                state, _ = step(state, part)
            except (ValueError, PeerError):
                assert int(state.step) == i
                state, _ = step(state, part)
        return step.unshard(state).params

    for found in run_ranks(run, 6):
        assert_equal_values(expected.params, found)
