"""The units that are found where none are chosen: which they are, what they take, and that programs
which use a repeated module in odd ways stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim, testing
from functorch_zero.errors import GroupError
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.model.repeated import LEAST, repeated_modules
from functorch_zero.model.units import Units, matches
from tests.model.trees import TREES, Block, Tree, block, mlp
from tests.modules import Net, Residual, seeded
from tests.tiers import crossed, tiers


def num_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def in_a_wrapper(name: str) -> tuple[Tree, Any]:
    """A tree as one child of its model, as tasks and heads have it; and the units for it."""
    make, units = TREES[name]
    with torch.device("meta"):
        return Tree(net=make()), units


def peak(model: nn.Module, units: Units = None) -> int:
    """Of a rank of 8 at level 3, in bytes."""
    return fz.plan(model, optim.adamw(1e-3), level=3, ranks=8, units=units).peak.total


# Chosen by hand, but no child of a container; and in one, beside the modules chosen
ALONE = {"unet": "bottleneck", "efficientnet": "net.features.7"}


@pytest.mark.parametrize("name", TREES)
def test_they_are_the_modules_that_one_would_choose(name: str) -> None:
    wrapped, units = in_a_wrapper(name)
    for model in (wrapped, wrapped.net):
        chosen = {
            path
            for path, module in model.named_modules()
            if matches(units, path, module) and num_elements(module) >= LEAST
        }
        others = chosen ^ repeated_modules(model).keys()
        assert chosen and all(path.endswith(ALONE.get(name, "none")) for path in others), others


@pytest.mark.parametrize("name", tiers(thorough=sorted(TREES)))
def test_the_peak_is_that_of_the_best_choice(name: str) -> None:
    model, units = in_a_wrapper(name)
    found, chosen = peak(model), peak(model, units)
    assert found <= 1.1 * chosen
    assert peak(model, "*") > 1.5 * chosen, "what a unit per child takes"


def hugging_face() -> dict[str, tuple[str, str, dict[str, Any], Units]]:
    """By name: the class of model and of config, its options, and the units for it."""
    layers = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    words = {"vocab_size": 500, "num_hidden_layers": 4, **layers}
    image = {"num_hidden_layers": 4, "image_size": 32, "patch_size": 8, **layers}
    grouped = {**words, "num_key_value_heads": 2}
    gpt2 = {"vocab_size": 500, "n_embd": 128, "n_layer": 4, "n_head": 4}
    t5 = {"vocab_size": 500, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4}
    distilbert = {"vocab_size": 500, "dim": 128, "hidden_dim": 256, "n_layers": 4, "n_heads": 4}
    opt = {"vocab_size": 500, "ffn_dim": 256, "word_embed_proj_dim": 128, "num_hidden_layers": 4}
    opt["num_attention_heads"] = 4
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    clip = {"text_config": {**words, **ids}, "vision_config": image, "projection_dim": 32}
    mamba = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 4}
    swin = {"image_size": 64, "embed_dim": 48, "depths": [2, 2, 6, 2], "window_size": 4}
    convnext = {"hidden_sizes": [48, 96, 192, 384], "depths": [3, 3, 9, 3]}
    return {
        "llama": ("LlamaForCausalLM", "LlamaConfig", words, "model.layers.*"),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", grouped, "model.layers.*"),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**grouped, "head_dim": 32}, "**.layers.*"),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", grouped, "model.layers.*"),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**gpt2, **ids}, "transformer.h.*"),
        "bert": ("BertForMaskedLM", "BertConfig", words, "bert.encoder.layer.*"),
        "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", distilbert, "**.layer.*"),
        "t5": ("T5ForConditionalGeneration", "T5Config", t5, "*.block.*"),
        "opt": ("OPTForCausalLM", "OPTConfig", {**opt, "hidden_size": 128}, "**.layers.*"),
        "vit": ("ViTForImageClassification", "ViTConfig", image, "**.layers.*"),
        "clip": ("CLIPModel", "CLIPConfig", clip, "*.encoder.layers.*"),
        "mamba": ("MambaForCausalLM", "MambaConfig", mamba, "backbone.layers.*"),
        "swin": ("SwinForImageClassification", "SwinConfig", swin, "**.layers.*.blocks.*"),
        "convnext": ("ConvNextModel", "ConvNextConfig", convnext, "encoder.stages.*.layers.*"),
    }


@pytest.mark.parametrize(
    "name", tiers(thorough=["llama"], full=sorted(hugging_face().keys() - {"llama"}))
)
def test_the_peak_of_a_model_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model_class, config_class, options, units = hugging_face()[name]
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    assert peak(model) <= 1.1 * peak(model, units)


# What is found in other trees


def found_in(**children: nn.Module) -> list[str]:
    with torch.device("meta"):
        return [*repeated_modules(Tree(net=Tree(**children)))]


def test_nothing_repeats() -> None:
    small = nn.ModuleList(block(8) for _ in range(3))
    assert num_elements(small[0]) < LEAST
    assert found_in(small=small) == []
    assert found_in(one=nn.ModuleList([block(64)])) == []
    assert found_in(no_children=nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))) == []
    assert found_in(a=block(64), b=block(64)) == [], "children by name, which may be whole models"


def test_the_outer_of_two_is_the_unit_and_its_experts_are_not() -> None:
    def layer() -> Tree:
        return Tree(gate=nn.Linear(64, 4), experts=nn.ModuleList(mlp(64, 256) for _ in range(4)))

    assert found_in(layers=nn.ModuleList([layer(), layer()])) == ["net.layers.0", "net.layers.1"]


def test_stages_are_opened() -> None:
    def stage(width: int) -> Tree:
        return Tree(blocks=nn.ModuleList([block(width), block(width)]))

    in_stages = ["net.stages.0.blocks.0", "net.stages.0.blocks.1"]
    in_stages += ["net.stages.1.blocks.0", "net.stages.1.blocks.1"]
    assert found_in(stages=nn.ModuleList([stage(64), stage(128)])) == in_stages
    # Sequentials even if they have the same shapes: each always runs all of its children
    alike = nn.Sequential(*(nn.Sequential(block(64), block(64)) for _ in range(2)))
    assert found_in(alike=alike) == [f"net.alike.{i}.{j}" for i in range(2) for j in range(2)]


def test_no_split_modules_name_them() -> None:
    named = Tree(body=block(64), _no_split_modules=None)
    assert [*repeated_modules(Tree(net=named))] == []
    named._no_split_modules = ["Block"]
    assert repeated_modules(Tree(net=named)) == {"net.body": "Block, named in _no_split_modules"}


def test_a_unit_is_a_module_that_runs() -> None:
    """No call would enter a ModuleList, nor a module without a forward."""
    odd = nn.Linear(64, 64)
    lists = nn.ModuleList([odd, nn.ModuleList([nn.Linear(64, 64)])])
    tied = Tree(blocks=nn.ModuleList([block(64), block(64)]), lists=lists)
    tied.blocks[1].mlp.fc1.weight = tied.blocks[0].mlp.fc1.weight
    namespace = nn.Module()
    namespace.a, namespace.b = nn.Linear(8, 8), nn.Linear(8, 8)
    for units in (None, Block):
        _, params, _ = functionalize(Tree(net=tied, namespace=namespace), units=units)
        modules = {unit.name: unit.leaves for unit in params.units}
        assert modules["net"] == ("net.blocks.0.mlp.fc1.weight",)
        assert {"net.lists.0", "net.lists.1.0"} <= {m for u in params.units for m in u.modules}
        assert any(name.startswith("namespace.a") for name in modules)
        assert not modules.keys() & {"net.blocks", "net.lists", "namespace"}


# Programs that use a repeated module in odd ways


def net(way: Way, make: Callable[[], nn.Module]) -> Net:
    """A body around repeated modules; `way` is how it uses them."""
    model = Net(
        lambda net, tokens: net.head(way(net, net.embed(tokens))),
        embed=nn.Embedding(64, 64),
        layers=nn.ModuleList(make() for _ in range(3)),
        head=nn.Linear(64, 64),
    )
    model.head.weight = model.embed.weight
    return Net(lambda around, tokens: around.net(tokens), net=model)


def layer() -> Residual:
    return Residual(64, 96)


Way = Callable[[Net, Tensor], Tensor]


def calls(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def by_another_method(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = x + layer.added(x)
    return x


def by_its_children(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = x + layer.down(torch.tanh(layer.up(x)))
    return x


def reads_outside(net: Net, x: Tensor) -> Tensor:
    x = F.linear(x, net.layers[2].up.weight[:64]) + net.embed.weight.mean(0)
    x = calls(net, x)
    return x * net.layers[0].down.bias + sum(p.square().mean() for p in net.parameters())


def twice_and_back(net: Net, x: Tensor) -> Tensor:
    return calls(net, net.layers[1](calls(net, x)))


def without_gradients_first(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = calls(net, x)
    return calls(net, x + seen)


def checkpointed(net: Net, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: net.layers[1](net.layers[0](x)), x, use_reentrant=False)
    return net.layers[2](x)


def by_functional_call(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        own = {name: 2 * p for name, p in layer.named_parameters()}
        x = functional_call(layer, own, (x,))
    return x


def as_an_ensemble(net: Net, x: Tensor) -> Tensor:
    own = [dict(layer.named_parameters()) for layer in net.layers]
    stacked = {name: torch.stack([params[name] for params in own]) for name in own[0]}
    return torch.func.vmap(lambda p: functional_call(net.layers[0], p, (x,)))(stacked).mean(0)


def attends(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = x + layer(x, x, x)[0]
    return x


def in_evaluation_mode(net: Net, x: Tensor) -> Tensor:
    return calls(net.eval(), x)


def one_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


WAYS: dict[str, tuple[Way, Callable[[], nn.Module]]] = {
    **{
        way.__name__: (way, layer)
        for way in (
            calls, by_another_method, by_its_children, reads_outside, twice_and_back,
            without_gradients_first, checkpointed, by_functional_call, as_an_ensemble,
        )
    },
    "attention": (attends, lambda: nn.MultiheadAttention(64, 2, batch_first=True)),
    "torch's encoders": (calls, one_encoder),
    "torch's encoders, evaluated": (in_evaluation_mode, one_encoder),
}  # fmt: skip


def step_of(name: str, **options: Any) -> tuple[Any, Any, Any, list[Any]]:
    way, make = WAYS[name]
    model = seeded(lambda: net(way, make).double())
    apply, params, buffers = functionalize(model, **options)

    def loss_fn(params: Any, buffers: Any, tokens: Tensor) -> Any:
        logits, buffers = apply(params, buffers, tokens)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), fz.Aux(buffers=buffers)

    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(64, (6, 5), generator=generator) for _ in range(2)]
    return fz.train_step(loss_fn, optim.sgd(0.1, momentum=0.9)), params, buffers, batches


@pytest.mark.parametrize(("name", "level"), crossed(WAYS, [3, 2, 1, 0], n=8, quick=2))
def test_odd_uses_stay_right(name: str, level: int) -> None:
    step, params, buffers, batches = step_of(name)
    assert sum(unit.name.startswith("net.layers") for unit in params.units) >= 3
    testing.assert_sharded_equals_unsharded(
        step, params, buffers, batches, levels=[level], ranks=[2], unused=["**.in_proj_bias"]
    )


@pytest.mark.parametrize("ranks", tiers([3], [1, 2]))
def test_recomputed_units(ranks: int) -> None:
    step, params, buffers, batches = step_of("calls", remat=True)
    testing.assert_sharded_equals_unsharded(
        step, params, buffers, batches, levels=[3], ranks=[ranks]
    )


def test_ranks_that_drop_layers_need_larger_units() -> None:
    """No rule can know that ranks skip different layers: they get the error that they get with any
    units, and its remedy works."""

    def train(group: Any, units: Units) -> float:
        def drops(net: Net, x: Tensor) -> Tensor:
            for i, layer in enumerate(net.layers):
                x = x if i == group.rank else layer(x)
            return x

        apply, params, buffers = functionalize(net(drops, layer), units=units)

        def loss_fn(params: Any, buffers: Any, tokens: Tensor) -> Any:
            return apply(params, buffers, tokens)[0].mean(), fz.Aux(buffers=buffers)

        step = fz.shard(fz.train_step(loss_fn, optim.sgd(0.1)), level=3, group=group)
        _, metrics = step(step.init(params, buffers), torch.zeros(2, 5, dtype=torch.int64))
        return metrics["loss"].item()

    with pytest.raises(GroupError, match=r'units="\*"'):
        run_ranks(lambda group: train(group, None), 2)
    losses = run_ranks(lambda group: train(group, "*"), 2)
    assert losses[0] == losses[1]
