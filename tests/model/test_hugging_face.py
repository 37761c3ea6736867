"""Models of Hugging Face's transformers, small and random; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import nn

from functorch_zero import optim
from functorch_zero.checkpoint import import_weights
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from tests.compare import assert_equal_updates, assert_same_on_all_ranks, train, train_sharded
from tests.models import even
from tests.modules import seeded
from tests.tiers import crossed

transformers = pytest.importorskip("transformers")


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=23,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=23,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def checkpointed() -> nn.Module:
    model = llama()
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "model.layers.*"),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), "model.layers.*"),
    "llama, checkpointed": (checkpointed, "model.layers.*"),
    "gpt2": (gpt2, "transformer.h.*"),
    "bert": (bert, "bert.encoder.layer.*"),
}
# A key's bias has no gradient but for rounding
ZERO = (
    "attention.self.key.bias",
    "attn.c_attn.bias",
)


def build(name: str) -> tuple[Any, Any, Any]:
    make, units = MODELS[name]
    model = seeded(lambda: make().double().train())
    apply, params, buffers = functionalize(model, units=units)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, new = apply(params, buffers, input_ids=batch["x"], use_cache=False)
        loss = nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten()
        )
        return loss, Aux(buffers=new, weight=len(batch["x"]))

    return train_step(loss_fn, optim.sgd(0.1, momentum=0.9)), params, buffers


def batches() -> list[Any]:
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randint(23, (6, 7), generator=g)} for _ in range(2)]


@pytest.mark.parametrize("name", MODELS)
def test_apply_is_the_model(name: str) -> None:
    make, units = MODELS[name]
    model = seeded(lambda: make().eval())
    apply, params, buffers = functionalize(model, units=units)
    x = batches()[0]["x"]
    expected, (got, new) = model(input_ids=x), apply(params, buffers, input_ids=x)
    assert type(got) is type(expected) and torch.equal(got.logits, expected.logits)
    assert all(new[path] is buffers[path] for path in buffers)
    assert sum("layer" in unit.name or ".h." in unit.name for unit in params.units) == 2


@pytest.mark.parametrize(("name", "level"), crossed(MODELS, [0, 1, 2, 3], n=8))
def test_sharded_is_unsharded(name: str, level: int) -> None:
    step, params, buffers = build(name)
    expected = train(step, params, buffers, batches())
    runs = run_ranks(
        lambda group: train_sharded(group, *build(name), batches(), even(6, 2), level=level), 2
    )
    assert_same_on_all_ranks(runs)
    zero = tuple(path for path in params if path.endswith(ZERO))
    # Llama's norms are taken in float32, whatever the model is in
    grade = 1e-5 if "llama" in name else 1e-12
    tolerance = lambda path: float("inf") if path.endswith(ZERO) else grade
    assert_equal_updates(expected, runs[0], unused=zero, tolerance=tolerance)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_remat_of_a_model_with_a_cache(name: str) -> None:
    """Each layer adds its keys and values to an object; the second run must not add them again."""
    make, units = MODELS[name]
    model = seeded(lambda: make().double().train())
    x = batches()[0]["x"]
    expected = model(input_ids=x, use_cache=True)
    expected.logits.square().mean().backward()
    apply, params, buffers = functionalize(model, units=units, remat=units)
    got, _ = apply(params, buffers, input_ids=x, use_cache=True)
    assert torch.equal(got.logits, expected.logits)
    grads = torch.autograd.grad(got.logits.square().mean(), [*params.values()])
    for path, grad in zip(params, grads, strict=True):
        assert torch.allclose(grad, model.get_parameter(path).grad, rtol=1e-12), path
    assert got.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == 7


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
def test_its_own_weights_are_all_that_an_import_asks_for(name: str) -> None:
    """Not the tables that no file has, and each weight that one lacks is missed."""
    make, units = MODELS[name]
    model = make()
    apply, params, buffers = functionalize(model, units=units)
    step = train_step(lambda p, b, x: apply(p, b, input_ids=x)[0].logits.mean(), optim.sgd(0.1))
    like = step.init(tree_map(lambda p: torch.zeros_like(p, requires_grad=True), params), buffers)
    weights = model.state_dict()
    state = import_weights(weights, step, like=like, aliases=apply)
    assert all(torch.equal(state.params[path], p) for path, p in params.items())
    weights.pop(next(path for path in params if "norm" in path or "ln" in path))
    with pytest.raises(StructureError, match=r"it lacks [^,]* \("):
        import_weights(weights, step, like=like, aliases=apply)
