"""What becomes of buffers that ranks change differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import PeerError, StructureError
from functorch_zero.groups import CountingGroup, counted, run_ranks
from functorch_zero.model import buffer_copies
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.buffers import ask_changes, synchronize
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded
from functorch_zero.testing.runs import Start, run_in_parts
from tests.modules import Net
from tests.tiers import crossed, thinned

INF = float("inf")
OLD = {
    "mean": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "other": torch.tensor([[0.1]]),
    "count": torch.tensor(3),
    "flag": torch.tensor([True, False]),
    "constant": torch.tensor([0.1, -INF, float("nan")], dtype=torch.float64),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "empty": torch.zeros(0),
}


def new_on(rank: int) -> dict[str, Tensor]:
    """Rank r's buffers; `other` is replaced on rank 1 only, `constant` on none."""
    new = dict(OLD)
    new["mean"] = OLD["mean"] + rank + 1
    new["count"] = OLD["count"] + rank + 1
    new["flag"] = torch.tensor([rank == 0, True])
    new["half"] = OLD["half"] * (rank + 1)
    if rank == 1:
        new["other"] = OLD["other"] + 3
    return new


def sync(rule: Any, ranks: int = 3) -> list[dict[str, Tensor]]:
    def run(group: Any) -> dict[str, Tensor]:
        flags = [True] * len(OLD)  # any rank's
        return synchronize(OLD, new_on(group.rank), flags, rule, group)

    return run_ranks(run, ranks)


def test_mean() -> None:
    for got in sync("mean"):
        assert torch.allclose(got["mean"], OLD["mean"] + 2, rtol=1e-14)
        assert torch.allclose(got["other"], OLD["other"] + 1)
        assert int(got["count"]) == 4 and got["flag"].tolist() == [True, True], (
            "integers are rank 0's"
        )
        assert got["half"].dtype == torch.bfloat16 and float(got["half"]) == 3.0
        assert got["constant"].view(torch.int64).equal(OLD["constant"].view(torch.int64)), (
            "to the bit"
        )
        assert all(got[name].shape == OLD[name].shape for name in OLD)


@pytest.mark.parametrize("old", [INF, 1e30, float(torch.finfo(torch.float32).max)])
def test_a_mean_far_below_the_value_before(old: float) -> None:
    """A smallest loss so far, say, that began as infinity."""
    before = {"best": torch.full((2,), old)}

    def run(group: Any) -> Tensor:
        new = {"best": torch.tensor([4.0 + group.rank, old])}
        return synchronize(before, new, [True], "mean", group)["best"]

    for best in run_ranks(run, 3):
        assert best.tolist() == [5.0, before["best"][1].item()]


def test_rank0() -> None:
    for got in sync("rank0"):
        expected = new_on(0)
        for name in set(OLD) - {"constant"}:
            assert torch.equal(got[name], expected[name]), name


def test_a_collective_a_dtype_and_none_without_changes() -> None:
    def run(group: Any) -> tuple[int, int]:
        watched = counted(group)
        synchronize(OLD, new_on(group.rank), [True] * len(OLD), "mean", watched)
        first = watched.num_calls()
        synchronize(OLD, dict(OLD), [False] * len(OLD), "mean", watched)
        return first, watched.num_calls() - first

    assert run_ranks(run, 2) == [(5, 0)] * 2  # float64, float32, int64, bool, bfloat16


def test_changes() -> None:
    def changed(new: Any, rule: Any = "mean", ranks: int = 2) -> int:
        return sum(ask_changes(OLD, new, rule, CountingGroup(ranks)).flags(0, look=False))

    assert changed(OLD) == 0 and changed(new_on(1)) == 5 and changed(new_on(0)) == 4
    assert changed(new_on(1), "local") == changed(new_on(1), ranks=1) == 0


@pytest.mark.parametrize("kind", ["by its version", "past its version"])
def test_a_write_in_backward_to_a_buffer_that_a_device_knows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the CPU stand for a device's. Past the version it is seen where the step looks."""
    monkeypatch.setattr(buffer_copies, "_SMALL", 0)
    monkeypatch.setattr(buffer_copies, "_is_comparable", lambda buffer: False)
    old = {"a": torch.ones(3), "b": torch.ones(2)}
    new = {"a": torch.ones(3), "b": torch.zeros(2)}
    changes = ask_changes(old, new, "mean", CountingGroup(2))
    assert changes.flags(0, look=True) == [False, True]
    (new["a"] if kind == "by its version" else new["a"].data)[1] = 2
    new["b"][1] = 2  # it is sent in any case
    with pytest.raises(StructureError, match=r"a buffer was written to in backward.*path a"):
        changes.flags(0, look=kind == "past its version")


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("rule", ["mean", "rank0", "local"])
def test_in_a_step(rule: Any, level: int) -> None:
    """Only rank 1's loss changes one of the buffers: all ranks take part all the same."""

    def run(group: Any) -> tuple[float, float]:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Aux]:
            new = {"seen": buffers["seen"] + batch, "rare": buffers["rare"]}
            if group.rank == 1:
                new["rare"] = buffers["rare"] + 4
            return params["w"].sum() * batch, Aux(buffers=new)

        step = shard(
            train_step(loss_fn, optim.sgd(0.1)), level=level, group=group, sync_buffers=rule
        )
        buffers = {"seen": torch.tensor(1.0), "rare": torch.tensor(2.0)}
        state = step.init({"w": torch.ones(3, requires_grad=True)}, buffers)
        for _ in range(2):
            state, _ = step(state, torch.tensor(float(group.rank + 1)))
        assert buffers["seen"] == 1 and buffers["rare"] == 2
        return float(state.buffers["seen"]), float(state.buffers["rare"])

    expected = {
        "mean": [(4.0, 6.0)] * 2,
        "rank0": [(3.0, 2.0)] * 2,
        "local": [(3.0, 2.0), (5.0, 10.0)],
    }
    assert run_ranks(run, 2) == expected[rule]


@pytest.mark.parametrize("rows", thinned([[0, 0], [4, 0], [0, 4]]))
@pytest.mark.parametrize("rule", ["mean", "rank0", "local"])
def test_a_batch_without_weight_changes_no_buffer(rule: Any, rows: list[int]) -> None:
    """The mean of no rows is NaN, and BatchNorm counts a batch of none; nor do its ranks count in
    the mean."""
    apply, params, buffers = functionalize(nn.BatchNorm1d(3).double())

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Aux]:
        output, new = apply(params, {name: buffers[name] for name in buffers if name != "seen"}, x)
        return output.square().mean(), Aux(
            buffers={**new, "seen": buffers["seen"] + x.mean()}, weight=len(x)
        )

    step = train_step(loss_fn, optim.sgd(0.1), accumulate=2)
    first = {**buffers, "seen": torch.zeros((), dtype=torch.float64)}
    batch = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    alone, _ = step(step.init(params, first), batch[: max(rows)])

    def run(group: Any) -> Any:
        sharded = shard(step, level=1, group=group, sync_buffers=rule)
        return sharded(sharded.init(params, first), batch[: rows[group.rank]])[0].buffers

    for rank, got in enumerate(run_ranks(run, 2)):
        idle = not rows[0 if rule == "rank0" else rank] if rule != "mean" else not any(rows)
        for name, expected in (first if idle else alone.buffers).items():
            assert torch.equal(got[name], expected), name


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.complex32])
def test_complex_buffers_are_averaged(dtype: torch.dtype) -> None:
    old = torch.tensor([1 + 2j, 0.1 - 1e4j, 3j]).to(dtype)

    def run(group: Any) -> Tensor:
        new = old.clone()
        new[0] += complex(group.rank, 3 * group.rank)
        # As a view that is conjugated on reading
        new = new.conj_physical().conj()
        return synchronize({"a": old}, {"a": new}, [True], "mean", group)["a"]

    for got in run_ranks(run, 3):
        assert got.dtype == dtype and not got.is_conj()
        assert got[0].item() == 2 + 5j
        assert torch.view_as_real(got)[1:].equal(torch.view_as_real(old)[1:]), "to the bit"


def test_float8_buffers_are_averaged() -> None:
    def run(group: Any) -> Tensor:
        new = torch.full((2,), float(group.rank)).to(torch.float8_e4m3fn)
        return synchronize({"a": torch.zeros_like(new)}, {"a": new}, [True], "mean", group)["a"]

    for got in run_ranks(run, 3):
        assert got.dtype == torch.float8_e4m3fn and got.float().tolist() == [1.0, 1.0]


def written_to() -> Net:
    """Buffers of several dtypes, which a forward writes to: by a kernel that doesn't count, by
    operators that do, and by assignment; and one that it only reads."""

    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.norm(net.linear(x)) * net.mask
        with torch.no_grad():
            mean = hidden.mean(0) + x.mean()
            net.phase.mul_(0.5).add_(torch.complex(mean, mean.sin()))
            net.largest = torch.maximum(net.largest, x.abs().max())
            net.seen |= mean > 0
        return hidden

    torch.manual_seed(0)
    return Net(
        forward,
        linear=nn.Linear(3, 4, bias=False),
        norm=nn.BatchNorm1d(4),
        phase=torch.zeros(4, dtype=torch.complex128),
        largest=torch.tensor(0.0),
        seen=torch.zeros(4, dtype=torch.bool),
        mask=torch.ones(4),
    )


def in_place(weighted: bool, **options: Any) -> tuple[Any, Any, Any]:
    """A step that says nothing of the buffers that its model writes to, and its params and
    buffers. Weights are 0 where the first number of a batch is negative."""
    model = written_to().double()

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        given = {**fz.unshard(params), **buffers}
        loss = (functional_call(model, given, (batch,)) - batch[:, :1]).square().mean()
        # Reassigned in a dict of `functional_call`'s own
        buffers["largest"] = given["largest"]
        return (loss, Aux(weight=float(batch[0, 0] > 0))) if weighted else loss

    step = train_step(loss_fn, optim.sgd(0.1), **options)
    return step, dict(model.named_parameters()), dict(model.named_buffers())


@pytest.mark.parametrize(
    ("level", "ranks", "rule", "options"),
    crossed(
        [0, 1, 2, 3],
        [1, 2, 3],
        ["mean", "rank0", "local"],
        [{}, {"accumulate": 2}, {"weighted": True}, {"weighted": True, "accumulate": 2}],
        n=12,
    ),
)
def test_buffers_written_in_place(level: int, ranks: int, rule: Any, options: Any) -> None:
    step, params, buffers = in_place(**{"weighted": False, **options})
    x = torch.randn(3, 24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # Of some ranks' parts, and of some micro-batches, the weight is 0
    x[:, :, 0].abs_()
    x[0, 0, 0] = x[1, -4, 0] = x[1, 12, 0] = -1.0
    assert_sharded_equals_unsharded(
        step, params, buffers, [*x], levels=[level], ranks=[ranks], per_rank=True,
        sync_buffers=rule,
    )  # fmt: skip


@pytest.mark.parametrize("level", [0, 3])
def test_the_state_given_stays(level: int) -> None:
    """Also where a step is skipped or fails, or evaluates; and ranks evaluate the same twice."""
    step, params, buffers = in_place(weighted=False, nonfinite="skip")

    def evaluate(params: Any, buffers: Any, x: Tensor) -> Any:
        loss = step.loss_fn(params, buffers, x)
        return {"loss": loss, "count": buffers["norm.num_batches_tracked"]}

    def run(group: Any) -> None:
        sharded = shard(step, level=level, group=group, donate=False)
        check = shard(fz.eval_step(evaluate), level=level, group=group)
        state = sharded.init(params, buffers)
        before = [(b, b._version, b.clone()) for b in state.buffers.values()]
        x = torch.full((4, 3), group.rank + 1.0, dtype=torch.float64)
        after, _ = sharded(state, x)
        assert after.buffers["norm.num_batches_tracked"] == 1
        assert after.buffers["mask"] is state.buffers["mask"]
        skipped, _ = sharded(state, x * float("inf"))
        with pytest.raises((PeerError, RuntimeError)):
            sharded(state, x[:, : 3 - group.rank])
        assert check(state, x) == check(state, x)
        for b, now, (tensor, version, values) in zip(
            skipped.buffers.values(), state.buffers.values(), before, strict=True
        ):
            assert b is now is tensor and now._version == version and torch.equal(now, values)

    run_ranks(run, 2)


def test_nothing_is_sent_for_buffers_that_stay() -> None:
    """The same calls as without buffers."""

    def run(group: Any) -> list[int]:
        calls = []
        for buffers in ({}, {"mask": torch.ones(3, 3).bool(), "table": torch.arange(3.0)}):
            watched = counted(group)
            step = train_step(lambda p, b, x: (p["w"] * x).sum(), optim.sgd(0.1))
            sharded = shard(step, level=1, group=watched)
            state = sharded.init({"w": torch.ones(3, requires_grad=True)}, buffers)
            before = watched.num_calls()
            sharded(state, torch.ones(3))
            calls.append(watched.num_calls() - before)
        return calls

    first, second = run_ranks(run, 2)[0]
    assert first == second


def table_and_statistics() -> Net:
    """A buffer that stays, and running statistics, which torch writes without counting."""
    table = torch.tensor([[0.0, -0.0, INF]])
    forward = lambda net, x: net.norm(x + net.table[:, :2].sum())
    return Net(forward, norm=nn.BatchNorm1d(3), table=table)


@pytest.mark.parametrize(
    ("level", "trains", "ranks", "large"),
    crossed([0, 1, 2, 3], [False, True], [2, 3], [False, True]),
)
def test_as_on_a_device_that_the_host_does_not_wait_for(
    level: int, trains: bool, ranks: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values as where the host knows what has changed. Of large buffers the device is
    asked, and only those that a rank changed are sent: as many calls, too."""

    def run(group: Any) -> Any:
        def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
            return functional_call(model, {**fz.unshard(params), **buffers}, (x,)).square().mean()

        watched = counted(group)
        sharded = shard(train_step(loss_fn, optim.sgd(0.1)), level=level, group=watched)
        state = sharded.init(dict(model.named_parameters()), dict(model.named_buffers()))
        before = watched.num_calls()
        state, _ = sharded(state, torch.arange(6.0).view(2, 3) + group.rank)
        return watched.num_calls() - before, state.buffers

    model = table_and_statistics().train(trains)
    expected = run_ranks(run, ranks)
    monkeypatch.setattr(buffer_copies, "_is_comparable", lambda buffer: False)
    if large:
        monkeypatch.setattr(buffer_copies, "_SMALL", 0)
    for (calls, buffers), (num_calls, known) in zip(run_ranks(run, ranks), expected, strict=True):
        # All floats travel in one message
        assert calls == (num_calls if large or trains else num_calls + 1)
        for path, buffer in known.items():
            assert torch.equal(buffers[path], buffer)
            assert torch.equal(buffers[path].signbit(), buffer.signbit())


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda b: b.double(), r"\(\(2,\), torch.float64\)"),
        (lambda b: torch.cat([b, b]), r"\(\(4,\), torch.float32\)"),
    ],
)
def test_another_shape_or_dtype_is_refused(level: int, change: Any, got: str) -> None:
    """On one rank only: the other learns of it. Where nothing is sent for buffers they may."""

    def run(group: Any, rule: Any = "mean") -> Any:
        def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
            if group is None or group.rank == group.size - 1:
                buffers["a"] = change(buffers["a"])
            return (params["w"] * x).sum()

        step: Any = train_step(loss_fn, optim.sgd(0.1))
        if group is not None:
            step = shard(step, level=level, group=group, sync_buffers=rule)
        state = step.init({"w": torch.ones(3, requires_grad=True)}, {"a": torch.ones(2)})
        return step(state, torch.ones(3))[0].buffers["a"]

    with pytest.raises(StructureError, match=rf"shape or dtype: path a.*got {got}.*on rank 1"):
        run_ranks(run, 2)
    for alone in (run(None), *run_ranks(run, 1)):
        assert torch.equal(alone, change(torch.ones(2)))
    for n, buffer in enumerate(run_ranks(lambda group: run(group, "local"), 2)):
        assert torch.equal(buffer, change(torch.ones(2)) if n else torch.ones(2))


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
def test_a_buffer_that_becomes_sparse_is_refused(level: int) -> None:
    """Ranks can't send it each other."""

    def run(group: Any, rule: Any) -> Any:
        def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
            if group.rank == group.size - 1:
                buffers["links"] = buffers["links"].to_sparse()
            return (params["w"] * x).sum()

        step = shard(
            train_step(loss_fn, optim.sgd(0.1)), level=level, group=group, sync_buffers=rule
        )
        state = step.init({"w": torch.ones(3, requires_grad=True)}, {"links": torch.eye(2)})
        return step(state, torch.ones(3))

    for rule in ("mean", "rank0"):
        words = r"changed a sparse buffer.*path links.*torch.sparse_coo.*on rank 1.*Remedy"
        with pytest.raises(StructureError, match=words):
            run_ranks(lambda group, rule=rule: run(group, rule), 2)


def test_the_oracles_own_rule() -> None:
    """Beside a loop that averages by hand: no function of the sharded step is used."""

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Aux]:
        buffers["sum"] += torch.complex(x.sum(), -x.sum())
        buffers["count"] += len(x)
        return (params["w"] * x).mean(), Aux(weight=float(x[0] != 7))

    step = train_step(loss_fn, optim.sgd(0.1))
    params = {"w": torch.ones((), dtype=torch.float64, requires_grad=True)}
    buffers = {"sum": torch.zeros((), dtype=torch.complex128), "count": torch.tensor(0)}
    parts = [torch.tensor([7.0]), torch.tensor([1.0, 2.0]), torch.tensor([4.0])]
    for run in run_in_parts(step, Start((params, buffers), 0), [parts]):
        held = run.at(0).others["buffers"]
        assert held["sum"] == 3.5 - 3.5j and held["count"] == 2
