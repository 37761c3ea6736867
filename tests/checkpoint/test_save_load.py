"""Saving and loading: at any level and world size, bit for bit; and what is refused."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from functorch_zero import checkpoint, optim
from functorch_zero.errors import DonatedError, MismatchError, StructureError
from functorch_zero.groups import ProcessGroup, launch, run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.groups.single import SingleRank
from functorch_zero.model.functionalize import functionalize
from functorch_zero.optim.naming import described
from functorch_zero.sharded.api import shard
from functorch_zero.step.loss import Aux
from functorch_zero.step.state import State
from functorch_zero.step.train import TrainStep, train_step
from functorch_zero.testing import assert_equal_updates, assert_equal_values
from functorch_zero.tree import named_leaves
from tests.checkpoints import assert_same, leftovers, load_on, make_step, on_ranks, save_on, trained
from tests.local import local_leaves
from tests.models import ZOO, even, split
from tests.modules import Net
from tests.tiers import THOROUGH, crossed, thinned, tiers


@pytest.mark.parametrize(("ranks", "level"), crossed([1, 2, 3, 4], [0, 1, 2, 3], quick=1))
def test_saved_anywhere_loads_anywhere(tmp_path: Path, ranks: int, level: int) -> None:
    """C1. Each (ranks, level) loads at every number of ranks, and the four tests of a number at
    each level there."""
    want = save_on(tmp_path, ranks, level, user={"cursor": [1, 2]})
    for to_ranks in (1, 2, 3, 4):
        assert_same(
            want, load_on(tmp_path, to_ranks, (to_ranks + level) % 4, donate=bool(to_ranks % 2))
        )
    step, params, buffers = make_step()
    restored = checkpoint.load(tmp_path, step, like=step.init(params, buffers))
    assert_same(want, restored.state)
    assert restored.user == {"cursor": [1, 2]}
    assert checkpoint.verify(tmp_path) == {2: []}
    assert not leftovers(tmp_path)


def test_seven_ranks(tmp_path: Path) -> None:
    assert_same(save_on(tmp_path, 6, 3), load_on(tmp_path, 7, 2))


OPTIMIZERS = {
    "adafactor": lambda: optim.adafactor(0.01),
    "shampoo": lambda: optim.shampoo(0.01),
    "soap": lambda: optim.soap(0.01),
    "muon": lambda: optim.muon(0.01),
    "schedule": lambda: optim.adamw(optim.cosine_decay_schedule(0.1, 20)),
    "ema": lambda: optim.chain(optim.sgd(0.1, momentum=0.9), optim.ema(0.9)),
    "finite": lambda: optim.apply_if_finite(optim.lion(0.01), 3),
    "nonzero": lambda: optim.apply_if_nonzero(optim.adamw(0.01)),
}


@pytest.mark.parametrize(
    ("name", "path"), crossed(OPTIMIZERS, [((2, 0), (3, 3)), ((4, 3), (3, 1))])
)
def test_every_kind_of_optimizer_state(tmp_path: Path, name: str, path: Any) -> None:
    """Whole-leaf states move to their new owners, statistics and counters are on every rank."""
    (ranks, level), (to_ranks, to_level) = path
    want = save_on(tmp_path, ranks, level, optimizer=OPTIMIZERS[name]())
    assert_same(want, load_on(tmp_path, to_ranks, to_level, optimizer=OPTIMIZERS[name]()))


@pytest.mark.parametrize("name", thinned(ZOO))
def test_every_model(tmp_path: Path, name: str) -> None:
    """Tied, shared, frozen, unused and 0-d leaves; buffers; more ranks than elements."""
    want = save_on(tmp_path, 3, 3, name=name)
    assert_same(want, load_on(tmp_path, 4, 3, name=name))
    assert_same(want, load_on(tmp_path, 2, 1, name=name))
    frozen = [k for k, v in want.params.items() if not v.requires_grad]
    got = load_on(tmp_path, 1, 0, name=name)
    assert [k for k, v in got.params.items() if not v.requires_grad] == frozen


@THOROUGH
def test_the_choice_of_units_does_not_matter(tmp_path: Path) -> None:
    save_on(tmp_path, 3, 3, name="gpt")
    # Other units: those of children
    apply, params, buffers = functionalize(ZOO["gpt"].model().double())
    step = train_step(lambda p, b, x: F.mse_loss(apply(p, b, x["x"])[0], x["x"]), optim.adamw(0.01))

    def run(group: Group) -> State:
        sharded = shard(step, level=3, group=group)
        return sharded.unshard(
            checkpoint.load(tmp_path, sharded, like=sharded.init(params, buffers)).state
        )

    for state in run_ranks(run, 2):
        assert_same(load_on(tmp_path, 2, 3, name="gpt"), state)


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_every_element_is_written_once_and_no_padding(tmp_path: Path, level: int) -> None:
    """At levels 0 to 2, too: what all ranks have is shared out evenly. Plain safetensors reads
    it."""
    want = save_on(tmp_path, 3, level, name="gpt")
    files = sorted((tmp_path / "step-000000000002").glob("*.safetensors"))
    parts: dict[str, dict[int, Tensor]] = {}
    sizes = []
    for file in files:
        sizes.append(0)
        for key, tensor in load_file(file).items():
            leaf, _, start = key.rpartition("@")
            parts.setdefault(leaf, {})[int(start)] = tensor
            sizes[-1] += tensor.nbytes
    for name, leaf in named_leaves(want).items():
        joined = torch.cat([tensor for _, tensor in sorted(parts[name].items())])
        assert torch.equal(joined, leaf.detach().reshape(-1)), name
    assert max(sizes) < 1.2 * sum(sizes) / 3


def noisy() -> Net:
    """With dropout and a buffer that changes."""
    return Net(
        lambda net, x: net.second(F.dropout(net.norm(net.first(x)), 0.3, net.training)),
        first=nn.Linear(5, 9),
        norm=nn.BatchNorm1d(9),
        second=nn.Linear(9, 2),
    )


def noisy_step(optimizer: Any) -> tuple[TrainStep, Any, Any, list[Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        apply, params, buffers = functionalize(noisy().double())
        batches = [torch.randn(12, 5).double() for _ in range(6)]

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        y, new = apply(params, buffers, x)
        return (y - 1).square().mean(), Aux(buffers=new)

    return train_step(loss_fn, optimizer), params, buffers, batches


def run_noisy(
    group: Group, level: int, optimizer: Any, folder: Path | None, resume: bool
) -> list[State]:
    """Six steps, saved after the third; or the last three of them."""
    base, params, buffers, batches = noisy_step(optimizer)
    step = shard(base, level=level, group=group)
    state = step.init(params, buffers, seed=7)
    seen = []
    if resume:
        assert folder is not None
        state = checkpoint.load(folder, step, like=state).state
    for k in range(int(state.step), 6):
        state, _ = step(state, batches[k].chunk(group.size)[group.rank])
        seen.append(step.unshard(state))
        if k == 2 and folder is not None:
            checkpoint.save(folder, step, state)
    return seen[-3:]


@pytest.mark.parametrize(
    ("name", "level"), crossed(["schedule", "soap", "shampoo", "adafactor"], [0, 3], quick=1)
)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, level: int, name: str) -> None:
    """C9. At the same world size: dropout, BatchNorm, schedules and preconditioners go on as if
    nothing had been."""
    want = run_ranks(lambda group: run_noisy(group, level, OPTIMIZERS[name](), tmp_path, False), 2)[
        0
    ]
    got = run_ranks(lambda group: run_noisy(group, level, OPTIMIZERS[name](), tmp_path, True), 2)[0]
    for a, b in zip(want, got, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("name", tiers(["mlp"], ["gpt"]))
def test_a_run_resumed_at_another_size_is_equal_but_for_rounding(tmp_path: Path, name: str) -> None:
    """C9, grade `reordered`, against the oracle that never stopped."""
    base, params, buffers = make_step(name)
    batches = ZOO[name].batches(5, 12)
    state = base.init(params, buffers)
    for batch in batches:
        state, _ = base(state, batch)

    def saved(group: Group) -> None:
        step = shard(base, level=3, group=group)
        ours = step.init(params, buffers)
        for batch in batches[:2]:
            ours, _ = step(ours, split(batch, even(12, group.size))[group.rank])
        checkpoint.save(tmp_path, step, ours)

    run_ranks(saved, 3)

    def resumed(group: Group) -> State:
        step = shard(base, level=1, group=group)
        ours = checkpoint.load(tmp_path, step, like=step.init(params, buffers)).state
        for batch in batches[2:]:
            ours, _ = step(ours, split(batch, even(12, group.size))[group.rank])
        return step.unshard(ours)

    for got in run_ranks(resumed, 4):
        for path, leaf in named_leaves(state.params).items():
            assert torch.allclose(got.params[path], leaf, rtol=1e-11, atol=1e-13), path


def test_processes(tmp_path: Path) -> None:
    """Over gloo: saved by two processes, read by three, and by none but this one."""

    def run(group: ProcessGroup | None = None) -> State:
        base, params, buffers = make_step()
        step = shard(base, level=3)
        state = trained(step, params, buffers, 1)
        checkpoint.save(tmp_path, step, state)
        return step.unshard(state)

    def read() -> State:
        base, params, buffers = make_step()
        step = shard(base, level=2)
        return step.unshard(checkpoint.load(tmp_path, step, like=step.init(params, buffers)).state)

    def kept(fn: Any) -> Any:
        return lambda: [x.detach().clone() for x in optree.tree_leaves(fn())]

    want = launch(kept(run), 2, start_method="fork", timeout=60)[0]
    for got in launch(kept(read), 3, start_method="fork", timeout=60):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_nan_and_infinities_keep_their_bits(tmp_path: Path) -> None:
    step = train_step(lambda p, b, x: p["w"].sum(), optim.adamw(0.1))
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1], dtype=torch.int32)
    params = {
        "w": bits.view(torch.float32).clone().requires_grad_(),
        "h": torch.ones(3, dtype=torch.bfloat16),
    }
    checkpoint.save(
        tmp_path, step, step.init(params, {"b": torch.tensor([True, False]), "e": torch.empty(0)})
    )
    like = step.init(
        {k: torch.zeros_like(v).requires_grad_(v.requires_grad) for k, v in params.items()},
        {"b": torch.tensor([False, False]), "e": torch.empty(0)},
    )
    state = checkpoint.load(tmp_path, step, like=like).state
    assert torch.equal(state.params["w"].detach().view(torch.int32), bits)
    assert state.buffers["b"].tolist() == [True, False]


def test_loading_does_not_write_to_like_unless_the_step_donates(tmp_path: Path) -> None:
    save_on(tmp_path, 2, 3)

    def pure(step: Any, like: Any) -> None:
        before = [x.detach().clone() for x in local_leaves(like)]
        checkpoint.load(tmp_path, step, like=like)
        assert all(torch.equal(a, b) for a, b in zip(before, local_leaves(like), strict=True))
        checkpoint.load(tmp_path, step, like=like)

    def donating(step: Any, like: Any) -> None:
        # Of the flats, too, which the first step would else make anew
        pointers = [x.data_ptr() for x in like.params.flats()]
        state = checkpoint.load(tmp_path, step, like=like).state
        assert pointers == [x.data_ptr() for x in state.params.flats()]
        with pytest.raises(DonatedError):
            checkpoint.load(tmp_path, step, like=like)

    on_ranks(2, 3, pure, donate=False)
    on_ranks(2, 3, donating, donate=True)


RATES = torch.tensor([0.1, 0.2], dtype=torch.float64)


@pytest.mark.parametrize(
    "rate", thinned([lambda count: RATES[count % 2], 0.1]), ids=["table", "number"]
)
def test_going_back_to_a_checkpoint(rate: Any, tmp_path: Path) -> None:
    """A trained state is written over, whose learning rate is one tensor in states of several
    steps. Training goes on as it did, and the optimizer's state that was written over is known."""
    step, params, batches = quadratic(optim.sgd(rate, momentum=0.9))
    expected = step.init(params)
    for x in batches:
        expected, _ = step(expected, x)

    def run(group: Any) -> None:
        sharded = shard(step, level=1, group=group)

        def train(state: Any, batches: Any) -> Any:
            for x in batches:
                state, _ = sharded(state, x.chunk(group.size)[group.rank])
            return state

        state = train(sharded.init(params), batches[:2])
        checkpoint.save(tmp_path, sharded, state)
        like = train(state, batches[:2])
        state = checkpoint.load(tmp_path, sharded, like=like).state
        with pytest.raises(DonatedError):
            sharded.unshard(state.replace(opt_state=like.opt_state))
        state = train(state, batches[2:])
        assert_equal_updates(params, expected.params, sharded.unshard(state).params)

    run_ranks(run, 2)


def quadratic(optimizer: Any) -> Any:
    """A step, params that two ranks cut, and batches."""
    g = torch.Generator().manual_seed(0)
    w, *batches = torch.randn(6, 12, 64, dtype=torch.float64, generator=g)

    def loss_fn(params: Any, buffers: Any, x: Any) -> Any:
        return (params["w"] - x[:, None]).square().mean()

    return train_step(loss_fn, optimizer), {"w": w.requires_grad_()}, batches


@pytest.mark.parametrize("donate", [True, False])
def test_going_back_to_leaves_of_another_order_of_dims(donate: bool, tmp_path: Path) -> None:
    """SOAP's eigenvectors lie column by column after the first step."""

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).tanh().square().mean()

    w, x = (torch.randn(13, 11, dtype=torch.float64) for _ in range(2))
    step = shard(train_step(loss, optim.soap(0.01)), level=2, group=SingleRank(), donate=donate)
    state, _ = step(step.init({"w": w.requires_grad_()}), x.mT.contiguous())
    leaves = optree.tree_leaves(step.unshard(state).opt_state)
    assert not all(leaf.is_contiguous() for leaf in leaves)
    checkpoint.save(tmp_path, step, state)
    expected = step.unshard(state)
    loaded, _ = checkpoint.load(tmp_path, step, like=state)
    assert_equal_values(expected.value, step.unshard(loaded).value, grade="bitwise")


def test_leaves_lie_in_flats_after_loading(tmp_path: Path) -> None:
    """So that no step has to pack them first."""
    save_on(tmp_path, 2, 3)

    def check(step: Any, like: Any) -> None:
        state = checkpoint.load(tmp_path, step, like=like).state
        pairs = zip(local_leaves(like), local_leaves(state), strict=True)
        in_flats = [
            (a._base.shape, b._base.shape) for a, b in pairs if a._base is not None and a.dim()
        ]
        assert in_flats and all(a == b for a, b in in_flats)

    on_ranks(2, 3, check, donate=False)


# C6: another model, optimizer or dtype


def saved_mlp(root: Path) -> None:
    step, params, buffers = make_step()
    checkpoint.save(root, step, step.init(params, buffers))


def load_into(root: Path, params: Any, optimizer: Any = None, **options: Any) -> State:
    step = train_step(lambda p, b, x: p.sum(), optimizer or optim.adamw(0.01))
    return checkpoint.load(root, step, like=step.init(params), **options).state


def test_another_optimizer(tmp_path: Path) -> None:
    saved_mlp(tmp_path)
    _, params, _ = make_step()
    with pytest.raises(
        StructureError, match=r"lacks opt_state.* and the checkpoint|the checkpoint has opt_state"
    ):
        load_into(tmp_path, params, optim.sgd(0.1))
    saved = r"Its optimizer was adamw\(learning_rate=0\.01, .*, the present one is sgd\("
    with pytest.raises(StructureError, match=saved):
        load_into(tmp_path, params, optim.sgd(0.1))
    state = load_into(tmp_path, params, optim.sgd(0.1), allow_extra=True, allow_missing=True)
    assert torch.equal(state.params["layers.0.weight"], params["layers.0.weight"])


def test_missing_and_extra_leaves(tmp_path: Path) -> None:
    saved_mlp(tmp_path)
    _, params, _ = make_step()
    more = {**params, "spare": torch.full((2,), 5.0).double().requires_grad_()}
    with pytest.raises(StructureError, match=r"lacks .*params\.spare.*allow_missing"):
        load_into(tmp_path, more)
    assert load_into(tmp_path, more, allow_missing=True).params["spare"].tolist() == [5, 5]
    assert load_into(tmp_path, more, allow_missing="**.spare").params["spare"].tolist() == [5, 5]
    with pytest.raises(StructureError, match=r"lacks .*params\.spare.*allow_missing"):
        load_into(tmp_path, more, allow_missing=["spare", "params.other"])
    less = {k: v for k, v in params.items() if k != "norm.bias"}
    with pytest.raises(
        StructureError, match=r"the checkpoint has .*params\.norm\.bias.*allow_extra"
    ):
        load_into(tmp_path, less)
    assert "norm.bias" not in load_into(tmp_path, less, allow_extra=True).params


def test_other_shapes_and_dtypes(tmp_path: Path) -> None:
    saved_mlp(tmp_path)
    _, params, _ = make_step()
    wide = {**params, "layers.0.weight": torch.zeros(7, 5).double().requires_grad_()}
    with pytest.raises(
        StructureError, match=r"params\.layers\.0\.weight has shape \(5, 7\), expected \(7, 5\)"
    ):
        load_into(tmp_path, wide, allow_missing=True, allow_extra=True, cast=True)
    single = {k: v.detach().float().requires_grad_() for k, v in params.items()}
    with pytest.raises(
        StructureError, match=r"is torch.float64, expected torch.float32 \(cast=True"
    ):
        load_into(tmp_path, single)
    zeros = {k: torch.zeros_like(v).requires_grad_() for k, v in single.items()}
    state = load_into(tmp_path, zeros, cast=True)
    assert all(torch.equal(state.params[k], v) for k, v in single.items())


def test_a_mistake_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    save_on(tmp_path, 2, 3)
    base, params, buffers = make_step()

    def run(group: Group) -> str:
        step = shard(base, level=3, group=group)
        like = step.init(params, buffers)
        if group.rank == 1:
            like = like.replace(seed=None)
        with pytest.raises(StructureError) as caught:
            checkpoint.load(tmp_path, step, like=like)
        return str(caught.value)

    texts = run_ranks(run, 3)
    assert len(set(texts)) == 1 and "rank 1: " in texts[0] and "seed" in texts[0]


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ((0, 1), "user is 0 on rank 0 and 1 on rank 1"),
        ((1, 1.0), "user is 1 on rank 0 and 1.0 on rank 1"),  # equal to Python
        (({"a": [1, "x"]}, {"a": [1, "y"]}), r'user\.a\[1\] is "x" on rank 0 and "y" on rank 1'),
        (({}, {"a": math.inf}), "user.a.* is absent on rank 0 and Infinity on"),
        (([1], [1, 2]), r"user\[1\] is absent on rank 0 and 2 on rank 1"),
        (({"a": 1, "b": 2}, {"b": 2, "a": 1}), None),
    ],
)
def test_ranks_that_save_other_user_data(tmp_path: Path, users: Any, words: str | None) -> None:
    def save(step: Any, state: Any) -> None:
        raised = pytest.raises(MismatchError, match=words) if words else contextlib.nullcontext()
        with raised:
            checkpoint.save(tmp_path, step, state, user=users[step.group.rank])

    on_ranks(2, 3, save)
    assert words is None or (checkpoint.latest(tmp_path) is None and not leftovers(tmp_path))


def test_ranks_that_save_other_numbers_or_steps(tmp_path: Path) -> None:
    def save(step: Any, state: Any) -> None:
        rank = step.group.rank
        with pytest.raises(MismatchError, match="the step is"):
            checkpoint.save(tmp_path, step, state.replace(step=state.step + rank))
        for buffers, words in (
            ({"n": rank}, r"numbers\[0\] is buffers\.n: 0 on rank 0 and buffers\.n: 1 on rank 1"),
            ({"x": torch.ones(1 + rank)}, r"leaves\[\d\] is buffers\.x: .*\(1,\).*x: .*\(2,\)"),
        ):
            with pytest.raises(MismatchError, match=f"{words}.*Remedy"):
                checkpoint.save(tmp_path, step, state.replace(buffers=buffers))

    on_ranks(2, 3, save)
    assert checkpoint.latest(tmp_path) is None and not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("user", "path"),
    [
        ({1: 2}, "user, "),
        ((1, 2), "user, "),
        ({"a": [0, {1}]}, r"user\['a'\]\[1\], "),
        (b"x", "user, "),
        (torch.ones(1), r"user, .*x\.tolist\(\)"),
        ({"best": np.float64(1)}, r"user\['best'\], .*float64"),
        ({"mode": True, "n": [2**9999]}, r"user\['n'\]\[0\], "),
    ],
    ids=str,
)
def test_user_is_plain_data(tmp_path: Path, user: Any, path: str) -> None:
    step, params, buffers = make_step()
    words = f"TypeError: user must be plain JSON data.*path {path}"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.save(tmp_path, step, step.init(params, buffers), user=user)


def test_user_data_in_itself(tmp_path: Path) -> None:
    step, params, buffers = make_step()
    user: list[Any] = []
    user.append(user)
    with pytest.raises(checkpoint.CheckpointError, match="nested too deep, or in itself"):
        checkpoint.save(tmp_path, step, step.init(params, buffers), user=user)


def test_states_that_are_refused(tmp_path: Path) -> None:
    step, params, buffers = make_step()
    state = step.init(params, buffers)
    with pytest.raises(StructureError, match="got dict"):
        checkpoint.save(tmp_path, step, dict(state.value._asdict()))  # type: ignore[arg-type]
    for leaf in (torch.eye(2).to_sparse(), object()):
        with pytest.raises(StructureError, match=r"what no checkpoint can hold: path buffers\.z"):
            checkpoint.save(tmp_path, step, state.replace(buffers={"z": leaf}))
    with pytest.raises(StructureError, match="meta device"):
        checkpoint.save(tmp_path, step, state.replace(buffers={"z": torch.zeros(2, device="meta")}))

    def donated(sharded: Any, first: Any) -> None:
        sharded(first, split(ZOO["mlp"].batches(1, 12)[0], even(12, 2))[sharded.group.rank])
        with pytest.raises(DonatedError):
            checkpoint.save(tmp_path, sharded, first)
        with pytest.raises(StructureError, match="whole state"):
            checkpoint.save(tmp_path, sharded, state)

    on_ranks(2, 2, donated)
    assert not leftovers(tmp_path)


def test_buffers_of_each_rank_are_refused(tmp_path: Path) -> None:
    base, params, buffers = make_step("convnet")

    def run(group: Group) -> None:
        step = shard(base, level=1, group=group, sync_buffers="local")
        state = step.init(params, buffers)
        with pytest.raises(StructureError, match='sync_buffers="rank0"'):
            checkpoint.save(tmp_path, step, state)
        checkpoint.save(tmp_path, shard(base, level=1, group=group, sync_buffers="rank0"), state)

    run_ranks(run, 2)


def test_values_that_are_no_tensors(tmp_path: Path) -> None:
    step, params, buffers = make_step()
    state = step.init(params, buffers).replace(buffers={"n": 3, "s": "text", "f": 0.1, "b": True})
    checkpoint.save(tmp_path, step, state)
    like = state.replace(buffers={"n": 0, "s": "", "f": 0.0, "b": False})
    assert checkpoint.load(tmp_path, step, like=like).state.buffers == state.buffers


def test_the_manifest_can_be_read_by_people(tmp_path: Path) -> None:
    save_on(tmp_path, 2, 3)
    text = (tmp_path / "step-000000000002" / "manifest.json").read_text().split("\n", 1)[1]
    rows = json.loads(text)
    assert rows["ranks"] == 2 and rows["level"] == 3 and rows["checksum"] == "crc32"
    optimizer = make_step()[0].optimizer
    assert rows["about"]["optimizer"] == {
        "printed": repr(optimizer),
        "name": optimizer.name,
        "hyperparams": described(optimizer)[optimizer.name],
    }
    assert rows["about"]["units"]


def test_load_in_inference_mode(tmp_path: Path) -> None:
    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).square().mean()

    step = train_step(loss_fn, optim.sgd(0.1))
    state = step.init({"w": torch.arange(5.0, requires_grad=True)})
    checkpoint.save(tmp_path, step, state)
    with torch.inference_mode():
        restored = checkpoint.load(tmp_path, step, like=state)
        assert torch.equal(restored.state.params["w"], torch.arange(5.0))
