"""Deferred initialisation: values by seed and path alone, a bucket at a time, and nothing left out
in silence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.errors import MismatchError, StructureError
from functorch_zero.groups import CountingGroup, ProcessGroup, launch, run_ranks
from functorch_zero.model import deferred_init as module
from functorch_zero.model.deferred_init import deferred_init
from functorch_zero.model.functionalize import functionalize
from functorch_zero.model.initialisation import Initialisation
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.models import GPT, Block, ConvNet
from tests.runtime.test_memory import LiveBytes
from tests.tiers import THOROUGH, crossed, thinned, tiers

LEVELS = (0, 1, 2, 3)


class Inits(nn.Module):
    """A nanoGPT-like model: `_init_weights` at the root, which also treats some leaves of
    children's children."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(depth=2)
        self.gain = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.empty(4, 4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)  # without a version counter
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, Block):
            nn.init.normal_(module.out.weight, std=0.01)
            nn.init.orthogonal_(module.down.weight)
        elif module is self:
            nn.init.trunc_normal_(self.gain)
            self.mask.copy_(torch.ones(4, 4).tril())

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt(x)


def attention() -> nn.Module:
    """_reset_parameters of two kinds, one of which writes into children of children, all of
    them."""
    return nn.Transformer(8, 2, 1, 1, 12, batch_first=True)


class Recursive(nn.Module):
    """Its reset_parameters calls its children's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(3, 4), nn.LSTM(4, 5), nn.Parameter(torch.empty(()))
        self.table = nn.Embedding(6, 4, padding_idx=2)

    def reset_parameters(self) -> None:
        self.a.reset_parameters()
        self.b.reset_parameters()
        self.scale = nn.Parameter(torch.randn_like(self.scale))


def conv() -> nn.Module:
    return ConvNet()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "inits": Inits, "gpt": GPT, "conv": conv, "attention": attention, "recursive": Recursive
}  # fmt: skip


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("name", tiers(["gpt", "conv", "recursive"], ["inits", "attention"]))
def test_a_value_depends_on_seed_and_path_only(name: str) -> None:
    """Made alone, in another order, or all together, it is the same; so are the units and buckets
    it is made with."""
    model = on_meta(MODELS[name])
    assert all(x.is_meta for x in tensors(model).values())
    together, other = (deferred_init(model, seed).fill(tensors(model)) for seed in (0, 1))
    values = deferred_init(model, 0)
    for path, x in reversed(tensors(model).items()):
        assert torch.equal(values.fill({path: x})[path], together[path]), path
        assert not x.is_floating_point() or not together[path].isnan().any()
        assert together[path].shape == x.shape and together[path].dtype == x.dtype
    assert any(not torch.equal(together[path], other[path]) for path in together)


def test_values_are_what_the_modules_make() -> None:
    made = deferred_init(model := on_meta(Inits), 0).fill(tensors(model))
    assert made["gpt.blocks.0.qkv.weight"].std() == pytest.approx(0.02, rel=0.3)
    assert made["gpt.blocks.0.out.weight"].std() == pytest.approx(0.01, rel=0.4)
    assert not made["gpt.blocks.1.up.bias"].any() and (made["gpt.norm.weight"] == 1).all()
    down = made["gpt.blocks.0.down.weight"]
    torch.testing.assert_close(down @ down.T, torch.eye(len(down)))
    assert torch.equal(made["mask"], torch.ones(4, 4).tril())
    assert not torch.equal(made["gpt.blocks.0.out.weight"], made["gpt.blocks.1.out.weight"]), (
        "another path, other draws"
    )
    linear = deferred_init(model := on_meta(lambda: nn.Linear(100, 200)), 0).fill(tensors(model))
    assert 0.99 / 10 < linear["weight"].abs().max() <= 0.1 and linear["bias"].any()
    recursive = deferred_init(model := on_meta(Recursive), 0).fill(tensors(model))
    assert not recursive["table.weight"][2].any() and recursive["table.weight"][1].all()


def test_a_tied_leaf_is_initialised_where_it_has_its_name() -> None:
    tied = deferred_init(model := on_meta(GPT), 0).fill(tensors(model))
    alone = deferred_init(model := on_meta(lambda: GPT(tied=False)), 0).fill(tensors(model))
    assert list(tied) == [path for path in alone if path != "head.weight"]
    assert all(torch.equal(tied[path], alone[path]) for path in tied)


def train(
    step: Any, params: Any, buffers: Any, values: Any, group: Any = None, **options: Any
) -> Any:
    """The state after one step, whole."""
    sharded = step if group is None else shard(step, group=group, **options)
    state = sharded.init(params, buffers, values=values)
    start = state if group is None else sharded.unshard(state)
    state, _ = sharded(state, torch.arange(12).view(4, 3) % 11)
    return start, state if group is None else sharded.unshard(state)


def prepared(units: Any = Block, trainable: Any = None) -> tuple[Any, ...]:
    model = on_meta(Inits)
    apply, params, buffers = functionalize(model, units=units)

    def loss_fn(p: Any, b: Any, x: Tensor) -> Tensor:
        return apply(p, b, x)[0].square().mean() + p["gain"].square().sum()

    return (
        train_step(loss_fn, optim.sgd(0.1), trainable=trainable),
        params,
        buffers,
        deferred_init(model, 3),
    )


@pytest.mark.parametrize(("level", "ranks"), crossed(LEVELS, [1, 2, 3], quick=1))
def test_the_same_at_every_level_and_world_size(level: int, ranks: int) -> None:
    start, end = train(*prepared())
    for got_start, got_end in run_ranks(
        lambda group: train(*prepared(), group, level=level), ranks
    ):
        for want, have in ((start, got_start), (end, got_end)):
            for path, leaf in want.params.items():
                assert leaf.requires_grad == have.params[path].requires_grad
            torch.testing.assert_close(dict(want.params), dict(have.params))
        assert all(torch.equal(start.params[path], leaf) for path, leaf in got_start.params.items())
        assert torch.equal(start.buffers["mask"], got_start.buffers["mask"])


@THOROUGH
def test_units_and_what_is_trained_do_not_matter() -> None:
    start, _ = train(*prepared())
    for units, trainable in (
        (None, None),
        (nn.Linear, None),
        (Block, lambda path, leaf: "weight" in path),
    ):
        (got, _), *_ = run_ranks(
            lambda g, u=units, t=trainable: train(*prepared(u, t), g, level=3), 2
        )
        assert all(torch.equal(start.params[path], leaf) for path, leaf in got.params.items())


@THOROUGH
def test_on_processes() -> None:
    start, _ = train(*prepared())
    runs = launch(
        lambda: train(*prepared(), ProcessGroup(), level=3), 3, start_method="fork", timeout=100
    )
    for got, _ in runs:
        assert all(torch.equal(start.params[path], leaf) for path, leaf in got.params.items())


def test_random_state_and_model_are_left_alone() -> None:
    model = on_meta(Inits)
    before, stream = {name: id(x) for name, x in model.named_parameters()}, torch.get_rng_state()
    deferred_init(model, 0).fill(tensors(model))
    assert torch.equal(stream, torch.get_rng_state())
    assert {name: id(x) for name, x in model.named_parameters()} == before
    assert all(p.is_meta for p in model.parameters())


def test_leaves_with_values_keep_them() -> None:
    model = on_meta(Inits)
    model.gpt.norm = nn.LayerNorm(6)
    nn.init.constant_(model.gpt.norm.weight, 7.0)
    apply, params, buffers = functionalize(model)
    step = train_step(lambda p, b, x: apply(p, b, x)[0].mean(), optim.sgd(0.1))
    for state in (
        step.init(params, buffers, values=deferred_init(model)),
        *run_ranks(lambda g: train(step, params, buffers, deferred_init(model), g, level=3)[0], 2),
    ):
        assert (state.params["gpt.norm.weight"] == 7).all() and not state.params[
            "gpt.embed.weight"
        ].isnan().any()


class Forgetful(nn.Module):
    """Leaves and buffers that nothing initialises."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if what == "leaf":
            self.gain = nn.Parameter(torch.ones(3))
        elif what == "partly":
            self.partly = nn.Parameter(torch.ones(3))
        elif what == "buffer":
            self.register_buffer("angles", torch.ones(3))
        else:
            self.register_buffer("positions", torch.arange(3))

    def _init_weights(self, module: nn.Module) -> None:
        if module is self and hasattr(self, "partly"):
            self.partly[:2].zero_()


@pytest.mark.parametrize(
    ("what", "path"),
    [("leaf", "gain"), ("partly", "partly"), ("buffer", "angles"), ("integer buffer", "positions")],
)
def test_what_nobody_initialised_is_an_error_that_names_it(what: str, path: str) -> None:
    model = on_meta(lambda: Forgetful(what))
    apply, params, buffers = functionalize(model)
    step = train_step(lambda p, b, x: apply(p, b, x)[0].mean(), optim.sgd(0.1))
    with pytest.raises(
        StructureError, match=rf"nobody initialised.*Forgetful.*path {path}\. Remedy: .*init="
    ):
        step.init(params, buffers, values=deferred_init(model))

    def init(path: str, module: nn.Module) -> None:
        if isinstance(module, Forgetful):
            for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                x.fill_(5)

    made = step.init(params, buffers, values=deferred_init(model, init=init))
    assert ({**made.params, **made.buffers}[path] == 5).all()


def test_a_module_is_initialised_by_a_look_at_its_own_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of the model's, for each module, would be quadratic in the model."""
    made: list[Tensor] = []
    unwanted = Initialisation.unwanted

    def counted(self: Initialisation, meta: Tensor, make: Callable[[], Tensor]) -> Any:
        made.append(meta)
        return unwanted(self, meta, make)

    monkeypatch.setattr(Initialisation, "unwanted", counted)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2, 3 + i) for i in range(5)))
    weight = model[3].weight
    deferred_init(model).fill({"3": {"weight": weight}})
    assert [tuple(meta.shape) for meta in made] == [(6,)]  # its bias


def test_another_models_leaves_are_an_error() -> None:
    _, params, _ = functionalize(on_meta(GPT))
    with pytest.raises(StructureError, match=r"does not have it.*path embed\.weight"):
        deferred_init(on_meta(ConvNet)).fill(params)


def test_a_leaf_of_another_shape_is_an_error() -> None:
    values = deferred_init(on_meta(lambda: nn.Linear(2, 3)))
    with pytest.raises(StructureError, match=r"another shape: path bias, expected \(4,\)"):
        values.fill(tensors(on_meta(lambda: nn.Linear(2, 4))))


def test_an_error_while_leaves_are_made_leaves_none_in_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of memory at the second leaf, say."""
    values = deferred_init(model := on_meta(Inits))
    num_made = 0

    def make_one(*args: Any) -> Tensor:
        nonlocal num_made
        num_made += 1
        if num_made == 2:
            raise MemoryError
        return blank(*args)

    blank = module._blank
    monkeypatch.setattr(module, "_blank", make_one)
    with pytest.raises(MemoryError):
        values.fill(tensors(model))
    assert all(x.is_meta for x in tensors(values._model).values())


def test_ranks_that_make_other_values_hear_of_it() -> None:
    def run(group: Any) -> Any:
        model = on_meta(lambda: nn.Linear(2, 3))
        apply, params, buffers = functionalize(model)
        values = deferred_init(
            model, init=lambda path, module: nn.init.constant_(module.bias, group.rank)
        )
        with pytest.raises(MismatchError, match=r"deferred values.*\.bias"):
            shard(
                train_step(lambda p, b, x: apply(p, b, x)[0].mean(), optim.sgd(0.1)),
                level=3,
                group=group,
            ).init(params, buffers, values=values)

    run_ranks(run, 2)


WIDTH, DEPTH, RANKS = 512, 12, 24
UNIT = WIDTH * WIDTH * 8


@pytest.mark.parametrize(
    ("level", "held"), thinned([(3, 2 * DEPTH / RANKS), (2, DEPTH * (1 + 1 / RANKS))], rows=True)
)
def test_the_peak_is_one_unit(level: int, held: float) -> None:
    """Beside what the rank keeps, params and momentum: a unit, and a megabyte or so for digests."""
    model = on_meta(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).double()
    )
    apply, params, buffers = functionalize(model)
    step = train_step(lambda p, b, x: apply(p, b, x)[0].mean(), optim.sgd(0.1, momentum=0.9))
    sharded = shard(step, level=level, group=CountingGroup(RANKS))
    with LiveBytes() as live:
        state = sharded.init(params, buffers, values=deferred_init(model))
    assert live.now / UNIT == pytest.approx(held, rel=0.05)
    slack = 5 * 2**20 / UNIT
    assert live.peak / UNIT <= held + 1.1 + slack
    assert live.peak / UNIT >= 1
    del state


def hugging_face(name: str) -> nn.Module:
    from tests.model.test_hugging_face import bert, gpt2, llama

    return {
        "gpt2": gpt2,
        "llama": llama,
        "llama, tied": lambda: llama(tie_word_embeddings=True),
        "bert": bert,
    }[name]()


@pytest.mark.parametrize("name", tiers(thorough=["llama, tied", "gpt2"], full=["llama", "bert"]))
def test_hugging_faces_models(name: str) -> None:
    """All leaves and buffers, with the spread that the model's own initialisation gives, the same
    one by one."""
    model = on_meta(lambda: hugging_face(name))
    assert all(p.is_meta for p in model.parameters())
    made, values = deferred_init(model).fill(tensors(model)), deferred_init(model)
    usual = tensors(hugging_face(name))
    assert made.keys() == usual.keys()
    for path, want in usual.items():
        have = made[path]
        assert torch.equal(values.fill({path: tensors(model)[path]})[path], have), path
        if not want.is_floating_point() or want.std() == 0 or "inv_freq" in path:
            assert torch.equal(want, have), path
        else:
            spread = 5 / math.sqrt(2 * want.numel())
            assert have.std().item() == pytest.approx(want.std().item(), rel=2 * spread), path
