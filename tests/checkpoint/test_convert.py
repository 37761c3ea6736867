"""Out to the files everybody reads, and in from them; what is kept; the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from functorch_zero import checkpoint, optim
from functorch_zero.__main__ import main
from functorch_zero.checkpoint import CheckpointError, CorruptError, convert, places
from functorch_zero.checkpoint.convert import map_file
from functorch_zero.checkpoint.dcp import write_tensors
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.groups.single import SingleRank
from functorch_zero.model.functionalize import functionalize
from functorch_zero.params import Params
from functorch_zero.sharded.api import shard
from functorch_zero.step.nonfinite import LossScale
from functorch_zero.step.state import State
from functorch_zero.step.train import train_step
from tests.checkpoints import assert_same, leftovers, make_step, on_ranks, save_on, trained
from tests.models import GPT, ZOO, Block, ConvNet, cross_entropy, even, split
from tests.modules import seeded
from tests.tiers import THOROUGH, tiers


def gpt() -> tuple[Any, Any, Any, Any]:
    """(apply, step, params, buffers) of a model with a tied weight."""
    apply, params, buffers = seeded(lambda: functionalize(GPT().double(), units=Block))
    # schedule-free keeps copies of the params, which an import must make anew
    step = train_step(
        lambda p, b, x: cross_entropy(apply(p, b, x["x"])[0], x["y"]),
        optim.schedule_free_adamw(0.01),
    )
    return apply, step, params, buffers


def zeros(params: Params) -> Params:
    return Params(
        {k: torch.zeros_like(v).requires_grad_(v.requires_grad) for k, v in params.items()},
        params.units,
    )


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """As Hugging Face's loaders do."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    found = {}
    for file in sorted(set(where.values())):
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            assert all(where[name] == file for name in opened.keys())  # noqa: SIM118
    assert set(found) == set(where)
    return found


@pytest.mark.parametrize("limit", tiers([3000], [5 * 10**9, 1]))
def test_out_and_in_again(tmp_path: Path, limit: int) -> None:
    """C8. Logical shapes, the model's names; the original module takes them; they load into
    pieces."""
    apply, base, params, buffers = gpt()

    def save(group: Group) -> State:
        step = shard(base, level=3, group=group)
        state = step.init(params, buffers)
        checkpoint.save(tmp_path / "root", step, state)
        return step.unshard(state)

    want = run_ranks(save, 3)[0]
    out = checkpoint.export_weights(
        tmp_path / "root", tmp_path / "out", aliases=apply, max_file_bytes=limit
    )
    assert not leftovers(tmp_path)
    tensors = read_all(out)
    model = GPT().double()
    model.load_state_dict(tensors)
    assert all(torch.equal(params[name], p) for name, p in model.named_parameters())

    def load(group: Group) -> list[State]:
        step = shard(base, level=3, group=group)
        states = []
        for source in (out, model.state_dict()):
            like = step.init(zeros(params), buffers)
            states.append(
                step.unshard(checkpoint.import_weights(source, step, like=like, aliases=apply))
            )
        return states

    for states in run_ranks(load, 2):
        for state in states:
            assert_same(want, state)
    whole = checkpoint.import_weights(
        out, base, like=base.init(zeros(params), buffers), aliases=apply
    )
    assert_same(want, whole)


def test_buffers_and_averages(tmp_path: Path) -> None:
    want = save_on(
        tmp_path / "root",
        2,
        3,
        name="convnet",
        optimizer=optim.chain(optim.sgd(0.1), optim.ema(0.9)),
    )
    ConvNet().double().load_state_dict(
        read_all(checkpoint.export_weights(tmp_path / "root", tmp_path / "out"))
    )
    average = read_all(
        checkpoint.export_weights(
            tmp_path / "root", tmp_path / "ema", trees=["opt_state.1.ema", "buffers"]
        )
    )
    ConvNet().double().load_state_dict(average)
    assert set(average) == {*want.params, *want.buffers}


def test_memory_is_that_of_a_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_on(tmp_path / "root", 2, 3)
    alive, most = [0], [0]
    read = convert.read_leaf

    def counted(*args: Any) -> torch.Tensor:
        tensor = read(*args)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
        return tensor

    monkeypatch.setattr(convert, "read_leaf", counted)
    checkpoint.export_weights(tmp_path / "root", tmp_path / "out")
    assert most[0] == 1


def test_rows_are_read_once_for_all_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_on(tmp_path / "root", 2, 3)
    read: list[int] = []
    read_rows = places.read_rows

    def counted(manifest: Any, folder: Path, number: int) -> Any:
        read.append(number)
        return read_rows(manifest, folder, number)

    monkeypatch.setattr(places, "read_rows", counted)
    out = checkpoint.export_weights(tmp_path / "root", tmp_path / "out")
    assert len(read_all(out)) > 2 and read == [0, 1]


def test_exports_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.export_weights(tmp_path, tmp_path / "out")
    save_on(tmp_path / "root", 2, 3)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        checkpoint.export_weights(tmp_path / "root", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no leaf under nothing"):
        checkpoint.export_weights(tmp_path / "root", tmp_path / "new", trees=["nothing"])
    with pytest.raises(CheckpointError, match="the alias a stands for b, which is no leaf"):
        checkpoint.export_weights(tmp_path / "root", tmp_path / "new", aliases={"a": "b"})
    file = tmp_path / "root" / "step-000000000002" / "rank-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptError, match=file.name):
        checkpoint.export_weights(tmp_path / "root", tmp_path / "new")
    assert not leftovers(tmp_path) and not (tmp_path / "new").exists()


def import_into(source: Any, **options: Any) -> State:
    step, params, buffers = make_step()
    return checkpoint.import_weights(source, step, like=step.init(params, buffers), **options)


def test_weights_of_another_model(tmp_path: Path) -> None:
    tensors = {k: v.detach().clone() for k, v in make_step()[1].items()}
    bias = tensors.pop("norm.bias")
    with pytest.raises(StructureError, match=r"it lacks norm\.bias \(aliases=apply"):
        import_into(tensors)
    import_into(tensors, allow_missing=True)
    with pytest.raises(StructureError, match=r"it has more, which `like` lacks \(aliases=apply"):
        import_into({**tensors, "norm.bias": bias, "more": bias})
    with pytest.raises(StructureError, match=r"it has m0, m1, m2, m3, m4, and 2 more, which"):
        import_into({**tensors, "norm.bias": bias} | {f"m{i}": bias for i in range(7)})
    with pytest.raises(StructureError, match=r"norm\.bias has shape \(1, 5\), expected \(5,\)"):
        import_into({**tensors, "norm.bias": bias[None]})
    with pytest.raises(
        StructureError, match=r"norm\.bias is torch.float32, expected torch.float64"
    ):
        import_into({**tensors, "norm.bias": bias.float()})
    import_into({**tensors, "norm.bias": bias.float()}, cast=True)
    with pytest.raises(StructureError, match=r"norm\.bias \(no tensor, a str\) has the name of a"):
        import_into({**tensors, "norm.bias": "x"})
    with pytest.raises(StructureError, match="tensors by name, got the key 3"):
        import_into({**tensors, 3: bias})


def rotary() -> tuple[Any, Any, Any, Any]:
    """(model, apply, step, state) with buffers that no state_dict has, one of them twice."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).double()
    model.register_buffer("table", torch.arange(3.0).double(), persistent=False)
    model[0].register_buffer("again", model.table, persistent=False)
    # This one is, under its second name
    model.register_buffer("shrunk", torch.ones(2).double(), persistent=False)
    model[1].register_buffer("shrunk", model.shrunk)
    apply, params, buffers = functionalize(model)
    step = train_step(lambda p, b, x: apply(p, b, x)[0].mean(), optim.sgd(0.1))
    return model, apply, step, step.init(params, buffers)


def test_buffers_that_no_state_dict_has(tmp_path: Path) -> None:
    model, apply, step, state = rotary()
    assert apply.not_persistent == {"table", "shrunk", "0.again"}
    assert apply.eval().not_persistent == apply.not_persistent
    tensors = model.state_dict()
    with pytest.raises(StructureError, match=r"it lacks shrunk, table \(aliases=apply"):
        checkpoint.import_weights(tensors, step, like=state, aliases={})
    with pytest.raises(StructureError, match=r"it lacks 1\.bias \("):
        lacks = {name: x for name, x in tensors.items() if name != "1.bias"}
        checkpoint.import_weights(lacks, step, like=state, aliases=apply)
    tensors["1.shrunk"] = tensors["1.shrunk"] * 3
    again = checkpoint.import_weights(tensors, step, like=state, aliases=apply)
    assert again.buffers["shrunk"].tolist() == [3, 3]
    assert torch.equal(again.buffers["table"], model.table)

    checkpoint.save(tmp_path / "root", step, state)
    out = checkpoint.export_weights(tmp_path / "root", tmp_path / "out", aliases=apply)
    written = load_file(out / "model.safetensors")
    assert set(written) == {*tensors, "shrunk"} and "table" not in written
    folder = checkpoint.export_dcp(tmp_path / "root", tmp_path / "dcp", aliases=apply)
    checkpoint.import_dcp(folder, step, like=state, aliases=apply)
    with pytest.raises(StructureError, match=r"it lacks table \("):
        checkpoint.import_dcp(folder, step, like=state, aliases={"1.shrunk": "shrunk"})


@pytest.mark.parametrize("level", tiers([3], [None]))
def test_names_that_the_params_know(tmp_path: Path, level: int | None) -> None:
    """Exports and imports need no `aliases=`: those of `functionalize` know tied weights and
    buffers that no state_dict has, through steps, `tree_map`, averages and checkpoints."""
    _, base, params, buffers = gpt()
    base = train_step(base.loss_fn, optim.chain(optim.sgd(0.1), optim.ema(0.9)))
    root = tmp_path / "root"

    def run(group: Group) -> State:
        step: Any = base if level is None else shard(base, level=level, group=group)
        state = step.init(params, buffers)
        state, _ = step(state, split(ZOO["gpt"].batches(1, 6)[0], even(6, 1))[0])
        checkpoint.save(tmp_path / "first", step, state)
        state = checkpoint.load(tmp_path / "first", step, like=step.init(params, buffers)).state
        checkpoint.save(root, step, state)
        # Each name that a state_dict has is in the source
        source = {name: x.detach() for name, x in GPT().double().state_dict().items()}
        again = checkpoint.import_weights(source, step, like=step.init(params, buffers))
        return again if level is None else step.unshard(again)

    again = run(SingleRank())
    model = GPT().double()
    ours = torch.nn.Module.state_dict(model)
    for trees in (("params", "buffers"), ("opt_state.1.ema", "buffers")):
        out = checkpoint.export_weights(root, tmp_path / trees[0], trees=trees)
        model.load_state_dict(read_all(out))
    assert set(read_all(tmp_path / "params")) == set(ours) > set(again.params)
    bare = checkpoint.export_weights(root, tmp_path / "bare", aliases={})
    assert set(read_all(bare)) == {*again.params, *again.buffers}
    # A dict knows nothing
    with pytest.raises(StructureError, match="which `like` lacks"):
        like = base.init({**params}, buffers)
        checkpoint.import_weights(ours, base, like=like)


class Tied(torch.nn.Module):
    """Three names of one leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(64, 4)
        self.head = torch.nn.Linear(4, 64, bias=False)
        self.head.weight = self.emb.weight
        self.again = self.head

    def forward(self, x: Any) -> Any:
        return self.again(self.head(self.emb(x)))


TIED = torch.arange(256, dtype=torch.float64).view(64, 4)  # four pieces of 512 bytes
NAMES = ("emb.weight", "head.weight", "again.weight")


def import_tied(source: Any, by: Any = checkpoint.import_weights, **options: Any) -> Any:
    """The leaf, as it was imported on three ranks and in one process."""
    _, params, buffers = functionalize(Tied().double())
    base = train_step(lambda p, b, x: p["emb.weight"].sum(), optim.sgd(0.1))

    def load(group: Group) -> Any:
        step = shard(base, level=3, group=group)
        state = by(source, step, like=step.init(params, buffers), **options)
        return step.unshard(state).params["emb.weight"]

    whole = by(source, base, like=base.init(params, buffers), **options).params["emb.weight"]
    assert all(torch.equal(x.nan_to_num(), whole.nan_to_num()) for x in run_ranks(load, 3))
    return whole


def test_a_module_under_two_names_is_exported_under_both(tmp_path: Path) -> None:
    _, params, buffers = functionalize(Tied().double())
    step = train_step(lambda p, b, x: p["emb.weight"].sum(), optim.sgd(0.1))
    checkpoint.save(tmp_path / "root", step, step.init(params, buffers))
    written = read_all(checkpoint.export_weights(tmp_path / "root", tmp_path / "out"))
    assert set(written) == {*NAMES}
    Tied().double().load_state_dict(written)


def test_names_of_one_leaf_with_equal_values() -> None:
    """NaNs are equal to themselves, and each name may be missing."""
    values = TIED.clone()
    values[3, 1] = torch.nan
    source = {name: values.clone() for name in NAMES}
    for names in (NAMES, NAMES[:2], NAMES[1:], NAMES[2:]):
        found = import_tied({name: source[name] for name in names})
        assert torch.equal(found.nan_to_num(), values.nan_to_num())
    rounded = {"emb.weight": TIED.float(), "head.weight": TIED}
    assert torch.equal(import_tied(rounded, cast=True), TIED)


@pytest.mark.parametrize(
    ("names", "stale"),
    tiers(
        [(NAMES, "emb.weight")],
        [(NAMES, "head.weight"), (NAMES[1:], "again.weight")],
        rows=True,
    ),
)
@pytest.mark.parametrize("at", tiers([(63, 3)], [(0, 0)]))
def test_names_of_one_leaf_with_other_values(
    names: Any, stale: str, at: Any, tmp_path: Path
) -> None:
    """An error on all ranks, though one alone has the element that differs; and a way out."""
    source = {name: TIED.clone() for name in names}
    source[stale][at] += 1
    save_file(source, tmp_path / "tied.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_tensors(tmp_path / "dcp", source)
    words = rf"{stale}.*names of one leaf here, and have different values"
    words += ". Remedy: rename=.*count, or allow_extra="
    if stale == "emb.weight":
        words = words.replace("emb.weight", "emb.weight and head.weight")
    by_dcp = {"source": tmp_path / "dcp", "by": checkpoint.import_dcp}
    for given in ({"source": source}, {"source": tmp_path / "tied.safetensors"}, by_dcp):
        with pytest.raises(StructureError, match=words):
            import_tied(**given)
        assert torch.equal(import_tied(**given, rename={stale: None}), TIED)
        with pytest.raises(StructureError, match=words):
            import_tied(**given, allow_extra=True)
        if stale != "emb.weight":
            assert torch.equal(import_tied(**given, allow_extra=f"*.x {stale}".split()), TIED)
        left = import_tied(**given, rename=lambda name: name if name == stale else None)
        assert torch.equal(left, source[stale])


def test_a_further_name_of_another_shape() -> None:
    with pytest.raises(StructureError, match=r"head\.weight has shape \(64, 5\), expected"):
        import_tied({"emb.weight": TIED, "head.weight": torch.ones(64, 5).double()})
    with pytest.raises(StructureError, match=r"head\.weight \(no tensor, a dict\) has the name"):
        import_tied({"emb.weight": TIED, "head.weight": {}})


EXTRA = {"a._extra_state": (1.0,), "_extra_state": torch.ones(3)}


def test_extra_states_are_left_out_where_that_is_asked(tmp_path: Path) -> None:
    """Unread; else an error names them. Of a module's state_dict, and of torch's folders."""
    for by, source in (
        (checkpoint.import_weights, {"emb.weight": TIED, **EXTRA}),
        (checkpoint.import_dcp, tmp_path / "dcp"),
    ):
        if isinstance(source, Path):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write_tensors(source, {"emb.weight": TIED, **EXTRA})  # type: ignore[dict-item]
        ways: list[dict[str, Any]] = [
            {"allow_extra": True},
            {"allow_extra": "**._extra_state"},
            {"rename": lambda name: None if name.endswith("_extra_state") else name},
            {"rename": dict.fromkeys(EXTRA)},
        ]
        for way in ways:
            assert torch.equal(import_tied(source, by, **way), TIED)
        with pytest.raises(StructureError, match=r"it has _extra_state, .*allow_extra") as caught:
            import_tied(source, by)
        assert re.search(
            r"a\._extra_state \(no tensor, a (tuple|pickled object)\)", str(caught.value)
        )


def test_dtypes_that_safetensors_lacks(tmp_path: Path) -> None:
    step = train_step(lambda p, b, x: p["w"].abs().sum(), optim.sgd(0.1))
    state = step.init({"w": torch.ones(3, dtype=torch.complex128, requires_grad=True)})
    checkpoint.save(tmp_path / "root", step, state)
    assert_same(state, checkpoint.load(tmp_path / "root", step, like=state).state)
    with pytest.raises(CheckpointError, match=r"can't hold params\.w: torch.complex128"):
        checkpoint.export_weights(tmp_path / "root", tmp_path / "out")


def test_patterns_of_leaves_that_may_be_missing(tmp_path: Path) -> None:
    tensors = {k: v.detach().clone() for k, v in make_step()[1].items()}
    tensors["more.a.b"] = tensors.pop("norm.bias")
    for missing, extra in (("norm.*", "more.**"), (["x", "**.bias"], ["*.*.b"]), (True, True)):
        import_into(tensors, allow_missing=missing, allow_extra=extra)
    with pytest.raises(StructureError, match=r"it lacks norm\.bias \("):
        import_into(tensors, allow_missing=["norm"], allow_extra=True)
    with pytest.raises(StructureError, match=r"it has more\.a\.b, which"):
        import_into(tensors, allow_missing="**", allow_extra="more.*")


@pytest.mark.parametrize("level", [None, 3])
def test_an_import_keeps_the_loss_scale(level: int | None) -> None:
    loss_fn, params, buffers = ZOO["mlp"].build()
    base = train_step(loss_fn, optim.sgd(0.1), loss_scale=LossScale(8.0))
    step = base if level is None else shard(base, level=level, group=SingleRank())
    like = step.init(params, buffers)
    before = [x.clone() for x in like.value.finite]
    state = checkpoint.import_weights({**params, **buffers}, step, like=like)
    assert all(map(torch.equal, before, state.value.finite))


def test_an_alias_that_is_a_leaf_itself() -> None:
    """It is read where the leaf's own name is lacking; else each has its own values."""
    step = train_step(lambda params, buffers, x: params["a"].sum(), optim.sgd(0.1))
    for values in ({"b": 2.0}, {"a": 1.0, "b": 2.0}):
        like = step.init({name: torch.zeros(2, requires_grad=True) for name in "ab"})
        tensors = {name: torch.full((2,), value) for name, value in values.items()}
        state = checkpoint.import_weights(tensors, step, like=like, aliases={"b": "a"})
        assert state.params["a"].tolist() == [values.get("a", 2.0)] * 2
        assert state.params["b"].tolist() == [2.0] * 2


def test_weights_under_other_names() -> None:
    tensors = {k: v.detach().clone() for k, v in make_step()[1].items()}
    prefixed = {f"model.{name}": x for name, x in tensors.items()}
    for source, rename in (
        (prefixed, lambda name: name.removeprefix("model.")),
        (prefixed, {f"model.{name}": name for name in tensors}),
        ({**prefixed, "step": torch.ones(1)}, lambda name: name.partition("model.")[2] or None),
    ):
        state = import_into(source, rename=rename)
        assert all(torch.equal(state.params[name], x) for name, x in tensors.items())
    with pytest.raises(StructureError, match=r"has norm\.b, which is not among"):
        import_into(tensors, rename={"norm.b": "norm.bias"})
    with pytest.raises(StructureError, match=r"two tensors the name norm\.bias"):
        import_into({**tensors, "bias": tensors["norm.bias"]}, rename={"bias": "norm.bias"})


def test_files_of_others(tmp_path: Path) -> None:
    """Written by the safetensors package; then damaged."""
    tensors = {k: v.detach().contiguous() for k, v in make_step()[1].items()}
    file = tmp_path / "model.safetensors"
    save_file({k: v.float() for k, v in tensors.items()}, file)
    for source in (file, str(file), tmp_path):
        state = import_into(source, cast=True)
        assert all(torch.equal(state.params[k], v.float().double()) for k, v in tensors.items())
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    refused = r"model\.safetensors: not a sound .*incomplete.*Remedy: fetch"
    with pytest.raises(CorruptError, match=refused):
        import_into(file, cast=True)
    file.unlink()
    with pytest.raises(CorruptError, match=r"model\.safetensors: No such file"):
        import_into(tmp_path, cast=True)


def test_a_folder_of_links(tmp_path: Path) -> None:
    """As Hugging Face's cache is laid out: names that are links to files named by their digests."""
    tensors = {k: v.detach().contiguous() for k, v in make_step()[1].items()}
    blobs, names = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    names.mkdir()
    save_file(tensors, blobs / "0123")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (blobs / "4567").write_text(json.dumps(index))
    (names / "model-1.safetensors").symlink_to("../blobs/0123")
    (names / "model.safetensors.index.json").symlink_to("../blobs/4567")
    state = import_into(names)
    assert all(torch.equal(state.params[k], v) for k, v in tensors.items())


@THOROUGH
def test_files_are_mapped(tmp_path: Path) -> None:
    """So that a rank has in memory only what it keeps."""

    def anonymous() -> int:
        rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(rows["RssAnon"].split()[0]) * 1024

    save_file({"a": torch.ones(2**24), "b": torch.ones(2**24)}, tmp_path / "x.safetensors")
    before = anonymous()
    found = map_file(tmp_path / "x.safetensors")
    assert found["a"].sum() == found["b"].sum() == 2**24
    assert anonymous() - before < 2**24  # of 2**27


def test_without_the_safetensors_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says what to install, on every rank; everything else works."""
    save_on(tmp_path / "root", 2, 3)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    out = checkpoint.export_weights(tmp_path / "root", tmp_path / "out")

    def load(step: Any, like: Any) -> None:
        with pytest.raises(CheckpointError, match="Remedy: pip install safetensors"):
            checkpoint.import_weights(out, step, like=like)

    on_ranks(2, 3, load)
    import_into({k: v.detach() for k, v in make_step()[1].items()})


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "..", ""])
def test_an_index_does_not_reach_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": name}})
    )
    with pytest.raises(CorruptError, match="is not the name of a file beside it"):
        import_into(tmp_path)


def test_keep(tmp_path: Path) -> None:
    step, params, buffers = make_step()
    state = step.init(params, buffers)
    for count in range(1, 9):
        checkpoint.save(tmp_path, step, state.replace(step=torch.tensor(count)))
    (tmp_path / "step-000000000007" / "manifest.json").unlink()
    # 7 is damaged: not counted, not deleted
    assert checkpoint.prune(tmp_path, last=2, every=4) == [
        1,
        2,
        3,
        5,
    ]
    assert list(checkpoint.verify(tmp_path)) == [4, 6, 7, 8]
    assert checkpoint.prune(tmp_path, last=1) == [4, 6]
    assert checkpoint.prune(tmp_path, last=1) == [] and not leftovers(tmp_path)
    with pytest.raises(ValueError, match="at least 1"):
        checkpoint.prune(tmp_path, last=0)


@THOROUGH
def test_the_command_in_a_process(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "functorch_zero",
        "checkpoint",
        "verify",
        str(tmp_path),
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"no checkpoint in {tmp_path}\n", "")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: object) -> Any:
        code = main(["checkpoint", *map(str, arguments)])
        captured = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=captured.out, stderr=captured.err)

    root = tmp_path / "root"
    assert command("ls", root).stdout == f"no checkpoint in {root}\n"
    save_on(root, 2, 3, steps=1)
    save_on(root, 1, 0, steps=2)
    listed = command("ls", root)
    assert listed.returncode == 0 and listed.stdout.splitlines()[0].startswith("step 1  ")
    assert "2 ranks  level 3" in listed.stdout and "1 rank  level 0" in listed.stdout
    assert all(line.endswith(str(make_step()[0].optimizer)) for line in listed.stdout.splitlines())
    assert command("verify", root).stdout == "step 1  intact\nstep 2  intact\n"
    wrote = command("export", root, tmp_path / "out", "--count", 1)
    assert wrote.returncode == 0 and "model.safetensors" in wrote.stdout
    again = command("export", root, tmp_path / "out")
    assert again.returncode == 2 and "exists" in again.stderr and "Traceback" not in again.stderr
    (root / "step-000000000001" / "rank-00002-of-00002.safetensors").unlink()
    broken = command("verify", root)
    assert (
        broken.returncode == 1 and "rank-00002-of-00002.safetensors: No such file" in broken.stdout
    )
    assert "step 1  damaged" in command("ls", root).stdout


def test_the_list_tells_levels_by_leaf_from_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, params, buffers = make_step()

    def save(group: Any) -> None:
        sharded = shard(step, level=lambda path, leaf: 3, group=group)
        checkpoint.save(tmp_path / "by leaf", sharded, sharded.init(params, buffers))

    run_ranks(save, 2)
    checkpoint.save(tmp_path / "alone", step, step.init(params, buffers))
    told = {"by leaf": "2 ranks  a level by leaf  ", "alone": "1 rank  unsharded  "}
    for name, expected in told.items():
        assert main(["checkpoint", "ls", str(tmp_path / name)]) == 0
        assert expected in capsys.readouterr().out


def test_the_zoo_exports_what_its_modules_take(tmp_path: Path) -> None:
    for name in ("mlp", "shared", "frozen", "unused", "scalars"):
        save_on(tmp_path / name, 2, 3, name=name)
        out = checkpoint.export_weights(tmp_path / name, tmp_path / f"{name}-out")
        ZOO[name].model().double().load_state_dict(read_all(out))


@pytest.mark.parametrize("level", tiers([3], [1]))
def test_dcp_out_and_in_again(tmp_path: Path, level: int) -> None:
    """What torch wrote in one process loads into pieces; what we wrote, `dcp.load` reads."""
    import torch.distributed.checkpoint as dcp

    base, params, buffers = make_step()

    def run(group: Group) -> Any:
        step = shard(base, level=level, group=group)
        state = trained(step, params, buffers, 1)
        checkpoint.save(tmp_path / "root", step, state)
        if group.rank == 0:
            checkpoint.export_dcp(tmp_path / "root", tmp_path / "dcp", prefix="model.")
        group.barrier()
        like = step.init(
            {k: torch.zeros_like(v).requires_grad_(v.requires_grad) for k, v in params.items()},
            buffers,
        )
        back = checkpoint.import_dcp(tmp_path / "dcp", step, like=like, prefix="model.")
        with pytest.raises(StructureError, match="lacks"):
            checkpoint.import_dcp(tmp_path / "dcp", step, like=back, prefix="other.")
        return step.unshard(state).params, step.unshard(back).params

    want, got = run_ranks(run, 3)[0]
    assert all(torch.equal(want[k], got[k]) and want[k].any() for k in want)
    read = {f"model.{k}": torch.zeros_like(v) for k, v in want.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(read[f"model.{k}"], v) for k, v in want.items())


def test_a_dcp_folder_that_cannot_be_read(tmp_path: Path) -> None:
    base, params, buffers = make_step()
    step = shard(base, level=3, group=SingleRank())
    state = trained(step, params, buffers, 1)
    checkpoint.save(tmp_path / "root", step, state)
    with pytest.raises(CheckpointError, match=r"import .*nowhere"):
        checkpoint.import_dcp(tmp_path / "nowhere", step, like=state)
    out = checkpoint.export_dcp(tmp_path / "root", tmp_path / "dcp")
    next(out.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="could not import"):
        checkpoint.import_dcp(out, step, like=state)


@pytest.mark.parametrize("export", [checkpoint.export_weights, checkpoint.export_dcp])
def test_a_state_is_no_folder(export: Any, tmp_path: Path) -> None:
    step, params, buffers = make_step()
    with pytest.raises(
        TypeError, match=r"expected the root .*got a State\. Remedy: checkpoint\.save"
    ):
        export(step.init(params, buffers), tmp_path / "out")
