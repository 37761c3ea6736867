"""Checkpoints, exports and leaves without the frozen params: over the same base at any layout, and
never over another one."""

from __future__ import annotations

import json
import zlib
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.__main__ import main
from functorch_zero.checkpoint import CheckpointError, CorruptError, save_job
from functorch_zero.checkpoint.contents import LocalLeaf
from functorch_zero.checkpoint.frozen import crc_shares, crcs_from
from functorch_zero.checkpoint.manifest import NAME, parse_manifest
from functorch_zero.checkpoint.snapshot import snapshot_of
from functorch_zero.errors import MismatchError, StructureError
from functorch_zero.groups import HybridGroup, SingleRank, run_ranks
from functorch_zero.testing import assert_equal_values
from tests.checkpoints import sealed
from tests.modules import Adapted, seeded
from tests.tiers import tiers

load_module = import_module("functorch_zero.checkpoint.load")  # `load` is the function, too
ALONE = (None, 1)
MIXED = {"": 3, "*.down": 1, "*.up": 1}


def build(seed: int = 0) -> tuple[Any, Any, Any]:
    """(step, params, buffers): two layers with a BatchNorm, whose buffers change, between them; the
    second layer under a further name."""
    model = seeded(lambda: nn.Sequential(Adapted(17, 2), nn.BatchNorm1d(17), Adapted(17, 2)), seed)
    for frozen in (model[0].linear, model[1], model[2].linear):
        frozen.requires_grad_(False)
    model.add_module("head", model[2])
    apply, params, buffers = fz.functionalize(model, units=["0", "1", "2"])

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        y, buffers = apply(params, buffers, x)
        return (y - 1).square().mean(), fz.Aux(buffers=buffers)

    return fz.train_step(loss_fn, optim.adamw(1e-2)), params, buffers


def is_adapter(path: str) -> bool:
    return path.endswith((".down", ".up"))


def batch(number: int) -> Tensor:
    return torch.randn(12, 17, generator=torch.Generator().manual_seed(number))


def on(layout: Any, fn: Any, *, like: Any = None, seed: int = 0) -> list[Any]:
    """`fn(step, its first state, group)` on each rank; of four, on two axes. `like`: other
    params."""
    level, ranks = layout
    base, params, buffers = build(seed)

    def run(group: Any) -> Any:
        step = base
        if level is not None:
            axes = HybridGroup(group, shard_size=2) if ranks == 4 else group
            step = fz.shard(base, level=level, group=axes)
        return fn(step, step.init(params if like is None else like, buffers), group)

    return run_ranks(run, ranks)


def whole(step: Any, state: Any) -> Any:
    return state if state.sharding is None else step.unshard(state)


def train(step: Any, state: Any, group: Any, first: int, last: int) -> Any:
    for number in range(first, last):
        state, _ = step(state, fz.data.share(batch(number), group))
    return state


def saved(root: Path, layout: Any = ALONE, **options: Any) -> fz.State:
    """The whole state after three steps, saved without frozen params."""

    def run(step: Any, state: Any, group: Any) -> Any:
        state = train(step, state, group, 0, 3)
        checkpoint.save(root, step, state, **{"frozen": False, **options})
        return whole(step, state)

    return on(layout, run)[0]


def load(root: Path, layout: Any = ALONE, *, like: Any = None, **options: Any) -> fz.State:
    def run(step: Any, state: Any, group: Any) -> Any:
        return whole(step, checkpoint.load(root, step, like=state, **options).state)

    return on(layout, run, like=like)[0]


@pytest.mark.parametrize(
    ("at", "then"),
    tiers(
        [((3, 3), (1, 2)), (ALONE, (MIXED, 3))],
        [
            *[((1, 2), (3, 4)), ((0, 3), (2, 2)), ((2, 2), (0, 3)), ((3, 4), (3, 3))],
            *[((1, 3), (1, 1)), ((3, 1), (2, 4)), ((MIXED, 2), ALONE)],
        ],
        rows=True,
    ),
)
def test_a_run_goes_on_over_the_same_base(tmp_path: Path, at: Any, then: Any) -> None:
    before = saved(tmp_path, at)
    assert checkpoint.verify(tmp_path) == {3: []}
    files = tmp_path.glob("step-*/*.safetensors")
    names = {name.partition("@")[0] for file in files for name in load_file(file)}
    assert {name for name in names if name.startswith("params.")} == {
        f"params.{path}" for path in before.params if is_adapter(path)
    }
    assert_equal_values(before, load(tmp_path, then))


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_saved_beside_training(tmp_path: Path, level: int) -> None:
    """Steps take the state's storage meanwhile, and go on as they would have."""

    def run(step: Any, state: Any, group: Any) -> Any:
        state = train(step, state, group, 0, 3)
        saving = checkpoint.async_save(tmp_path, step, state, frozen=False)
        before = whole(step, state)
        state = train(step, state, group, 3, 5)
        saving.result()
        return before, whole(step, state)

    before, after = on((level, 1), run)[0]
    assert_equal_values(before, load(tmp_path, (3, 2)))

    def go_on(step: Any, state: Any, group: Any) -> Any:
        state = checkpoint.load(tmp_path, step, like=state).state
        return whole(step, train(step, state, group, 3, 5))

    assert_equal_values(after, on((level, 1), go_on)[0])


def test_a_frozen_leaf_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    step, params, buffers = build()
    state = step.init(params, buffers)
    snapshot = snapshot_of(step, state, None, frozen=False)
    snapshot.check_unchanged()
    state.params["1.weight"].add_(1)
    with pytest.raises(CheckpointError, match=r"params\.1\.weight was changed in place"):
        snapshot.check_unchanged()
    with pytest.raises(CheckpointError, match=r"params\.1\.weight was changed in place"):
        snapshot.copied().check_unchanged()


def put(path: str, change: Any) -> Any:
    """The first params with another leaf."""
    params = build()[1]
    before = params[path]
    params[path] = change(before.detach().clone()).requires_grad_(before.requires_grad)
    return params


@pytest.mark.parametrize("then", tiers([ALONE], [(3, 3)]))
def test_another_base_is_named(tmp_path: Path, then: Any) -> None:
    before = saved(tmp_path, (3, 2))

    def refused(path: str, change: Any, match: str, **options: Any) -> None:
        with pytest.raises(StructureError, match=match):
            load(tmp_path, then, like=put(path, change), **options)

    values = r"other values in frozen leaves that the .*without: params\.{}\. Remedy"
    last = values.format(r"2\.linear\.weight")
    refused("2.linear.weight", lambda x: x.index_add(0, torch.tensor([16]), x[:1]), last)
    refused("2.linear.weight", lambda x: x.flip(0), last)
    refused("1.bias", lambda x: -x, values.format(r"1\.bias"))  # the sign of 0
    # What the checkpoint has is no part of it, and neither is a leaf that may be another
    assert_equal_values(before, load(tmp_path, then, like=put("2.up", lambda x: x + 1)))
    other = put("1.bias", lambda x: x + 1)
    loaded = load(tmp_path, then, like=other, allow_missing="params.1.*")
    assert torch.equal(loaded.params["1.bias"], other["1.bias"])
    refused("0.linear.bias", lambda x: x + 1, r"params\.0\.linear\.bias", allow_missing="**.1.*")


@pytest.mark.parametrize("then", tiers([(3, 2)], [ALONE]))
def test_a_base_of_another_form_is_named(tmp_path: Path, then: Any) -> None:
    before = saved(tmp_path, (1, 3))

    def refused(match: str, params: Any, **options: Any) -> None:
        def run(step: Any, state: Any, group: Any) -> None:
            checkpoint.load(tmp_path, step, like=state, **options)

        with pytest.raises(StructureError, match=match):
            on(then, run, like=params)

    refused(
        "params.1.weight is torch.float32, expected torch.float64", put("1.weight", Tensor.double)
    )
    refused(
        r"params.1.weight has shape \(17,\), expected \(16,\)", put("1.weight", lambda x: x[:16])
    )
    fewer = build()[1]
    del fewer["1.weight"]
    refused(r"the checkpoint has params\.1\.weight, which `like` lacks", fewer)
    # A wider base is compared as it was: this one is the same, and that one isn't
    wide = load(tmp_path, then, like=put("1.weight", Tensor.double), cast=True)
    assert torch.equal(wide.params["1.weight"], before.params["1.weight"].double())
    refused("other values", put("1.weight", lambda x: x.double() + 1), cast=True)


def test_a_checksum_is_that_of_the_whole_leaf() -> None:
    """Whatever pieces ranks hold."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(n, generator=generator).to(torch.bfloat16) for n in (0, 1, 300, 70_001)]
    leaves.append(torch.randn(5, 3, generator=generator).T)  # not row by row
    dtypes = [leaf.dtype for leaf in leaves]
    want = [zlib.crc32(bytes(x.contiguous().view(torch.uint8).flatten().tolist())) for x in leaves]
    for cuts in ([0, 1, 1], [0.5, 1, 1], [0.1, 0.1, 1]):
        shares = []
        for rank in range(3):
            held = []
            for i, leaf in enumerate(leaves):
                n = leaf.numel()
                start, stop = (0, *(int(n * cut) for cut in cuts))[rank : rank + 2]
                piece = leaf.reshape(-1)[start:stop]
                everywhere = i == 2
                held.append(
                    LocalLeaf(str(i), leaf, tuple(leaf.shape), 0, n, True)
                    if everywhere
                    else LocalLeaf(str(i), piece, tuple(leaf.shape), start, stop, False)
                )
            shares.append(crc_shares(held, dtypes, rank, 3))
        assert crcs_from(shares, len(leaves)) == want


def test_ranks_that_leave_out_different_leaves(tmp_path: Path) -> None:
    def run(step: Any, state: Any, group: Any) -> None:
        checkpoint.save(tmp_path, step, state, frozen=group.rank == 0)

    with pytest.raises(MismatchError, match="the ranks save different things: leaves"):
        on((3, 2), run)


def test_nothing_that_was_saved_is_lost(tmp_path: Path) -> None:
    """Neither a step that has a checkpoint, nor the only one that has the base."""
    step, params, buffers = build()
    state = step.init(params, buffers)

    def save(count: int, frozen: bool) -> None:
        checkpoint.save(tmp_path, step, state.replace(step=count), frozen=frozen)

    for count, frozen in enumerate([True, True, False, False, False]):
        save(count, frozen)
    with pytest.raises(CheckpointError, match="exists"):
        save(1, False)
    assert checkpoint.prune(tmp_path, last=1) == [0, 2, 3]
    assert list(checkpoint.verify(tmp_path)) == [1, 4]
    save(5, True)
    assert checkpoint.prune(tmp_path, last=1) == [1, 4]
    # Each that is kept has a base of its own
    save(6, False)
    save(7, True)
    save(8, True)
    save(9, False)
    assert checkpoint.prune(tmp_path, last=1, every=6) == [7]


def test_leaves_without_frozen_ones() -> None:
    def run(step: Any, state: Any, group: Any) -> Any:
        trained = list(checkpoint.leaves(step, state, frozen=False))
        everything = list(checkpoint.leaves(step, state, of="", frozen=False))
        return trained, everything, whole(step, state)

    for layout in ((3, 2), (1, 2), ALONE):
        found, everything, state = on(layout, run)[0]
        assert [path for path, _ in found] == [path for path in state.params if is_adapter(path)]
        assert all(torch.equal(leaf, state.params[path]) for path, leaf in found)
        names = [path for path, _ in everything]
        assert "buffers.1.running_mean" in names and "params.1.weight" not in names


def test_exports_without_frozen_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From either checkpoint, and in again over a base."""
    part, full = tmp_path / "part", tmp_path / "full"
    state = saved(part, (3, 2))
    saved(full, (3, 2), frozen=True)
    with pytest.raises(CheckpointError, match=r"without the frozen params\.0\.linear\.bias"):
        checkpoint.export_weights(part, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"without the frozen params\.0\.linear\.bias"):
        checkpoint.export_dcp(part, tmp_path / "out")
    own = [path for path in state.params if is_adapter(path)]
    tied = [f"head.{path[2:]}" for path in own if path.startswith("2.")]
    for root in (part, full):
        out = checkpoint.export_weights(root, tmp_path / f"{root.name}-out", frozen=False)
        found = load_file(out / "model.safetensors")
        assert found.keys() == {*own, *tied, *state.buffers}
        for path in own:
            assert torch.equal(found[path], state.params[path])
    command = ["checkpoint", "export", str(part), str(tmp_path / "command"), "--no-frozen"]
    assert main(command) == 0 and main(["checkpoint", "ls", str(part)]) == 0
    assert "(6 frozen ones left out)" in capsys.readouterr().out

    def bring(step: Any, first: Any, group: Any) -> Any:
        return whole(step, checkpoint.import_weights(source, step, like=first, frozen=False))

    source: Any = out
    assert_equal_values(state.params, on((3, 2), bring)[0].params)
    source = {name: leaf for name, leaf in found.items() if name not in ("0.up", "1.running_var")}
    lacking = r"it lacks 0\.up, 1\.running_var \(.*frozen=False keeps `like`'s params that aren't"
    with pytest.raises(StructureError, match=lacking):
        on((3, 2), bring)


def test_of_programs_and_earlier_versions_nothing_is_known(tmp_path: Path) -> None:
    program = fz.program_step(lambda value: (value, {}), init=lambda params: params)
    state = program.init({"w": torch.ones(2)})
    with pytest.raises(StructureError, match="frozen=False is for training steps"):
        checkpoint.save(tmp_path, program, state, frozen=False)
    with pytest.raises(StructureError, match="frozen=False is for training steps"):
        list(checkpoint.leaves(program, state, of="", frozen=False))
    checkpoint.save(tmp_path, program, state)
    with pytest.raises(CheckpointError, match="doesn't say which leaves are frozen"):
        checkpoint.export_weights(tmp_path, tmp_path / "out", trees=("w",), frozen=False)


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        ((), [], "left_out is no list of leaves"),
        ((), {}, "left_out is no list of leaves"),
        ((0,), ["params.x", "F32", [1], None], "no leaf and its CRC"),
        ((0, 0), 3, "no leaf"),
        ((0, 0), "params.0.up", "a path occurs twice"),
        ((0, 1), "F99", "unknown dtype"),
        ((0, 2), [2**40, 2**40], "is not a shape"),
        ((0, 4), -1, "no CRC-32"),
        ((0, 4), 2**32, "no CRC-32"),
        ((0, 4), True, "no CRC-32"),
    ],
)
def test_what_is_wrong_is_said(manifest: bytes, at: Any, value: Any, text: str) -> None:
    body = json.loads(manifest.split(b"\n", 1)[1])
    if at:
        *way, last = at
        node = body["left_out"]
        for key in way:
            node = node[key]
        node[last] = value
    else:
        body["left_out"] = value
    with pytest.raises(CorruptError, match=text):
        parse_manifest(sealed(json.dumps(body).encode()), "it")


def test_only_version_3_leaves_out(manifest: bytes) -> None:
    body = json.loads(manifest.split(b"\n", 1)[1])
    for changed in ({**body, "version": 2}, {k: v for k, v in body.items() if k != "left_out"}):
        with pytest.raises(CorruptError, match=r"has the keys \['left_out'\] too many or too few"):
            parse_manifest(sealed(json.dumps(changed).encode()), "it")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("saved")
    saved(root)
    (path,) = root.glob(f"step-*/{NAME}")
    return path.read_bytes()


@pytest.mark.parametrize("name", ["load", "import"])
def test_a_load_waits_for_the_save_that_reads_what_it_writes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    step, params, buffers = build()
    sharded = fz.shard(step, level=1, group=SingleRank(), donate=True)
    state = sharded.init(params, buffers)
    checkpoint.save(tmp_path / "whole", sharded, state)
    is_waited_for = Event()

    def late(*args: Any) -> Any:
        assert is_waited_for.wait(60)
        return crc_shares(*args)

    monkeypatch.setattr(save_job, "crc_shares", late)
    saving = checkpoint.async_save(tmp_path / "partial", sharded, state, frozen=False)
    join = saving._thread.join
    monkeypatch.setattr(saving._thread, "join", lambda *args: (is_waited_for.set(), join(*args)))
    chosen = load_module.chosen

    def chosen_at_last(*args: Any) -> Any:
        assert saving.done
        return chosen(*args)

    monkeypatch.setattr(load_module, "chosen", chosen_at_last)
    calls: dict[str, Any] = {
        "load": lambda: checkpoint.load(tmp_path / "whole", sharded, like=state),
        "import": lambda: checkpoint.import_weights({**params, **buffers}, sharded, like=state),
    }
    try:
        calls[name]()
    finally:
        is_waited_for.set()
    saving.result(60)


def test_a_trained_leaf_whose_name_is_a_frozen_ones_but_for_a_dot(tmp_path: Path) -> None:
    params = {"w": torch.ones(3, requires_grad=True), "w.": torch.ones(3)}
    step = fz.train_step(lambda p, b, x: (x * p["w"] + p["w."]).square().mean(), optim.sgd(0.1))
    state, _ = step(step.init(params, {}), torch.ones(2, 3))
    checkpoint.save(tmp_path, step, state, frozen=False)
    loaded, _ = checkpoint.load(tmp_path, step, like=step.init(params, {}))
    assert torch.equal(loaded.params["w"], state.params["w"])
