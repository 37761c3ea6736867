"""A decoder language model's leaves and units from its counts, without a module."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..params import Params, UnitSpec
from ..precision import Precision


@dataclass(frozen=True)
class Shape:
    """Counts of a decoder language model: without biases, one norm before attention, one before the
    feed-forward."""

    layers: int
    width: int
    vocab: int
    hidden: int = 0  # of the feed-forward; 0: four times the width
    heads: int = 1
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: width / heads
    gated: bool = False  # a third matrix in the feed-forward
    tied: bool = False  # the head is the embedding

    def __post_init__(self) -> None:
        for name in ("layers", "width", "vocab", "hidden", "heads", "kv_heads", "head_dim"):
            least = 1 if name in ("layers", "width", "vocab", "heads") else 0
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide the heads, {self.heads}; got {self.kv_heads}")
        if not self.head_dim and self.width % self.heads:
            raise ValueError(f"heads must divide the width, {self.width}; got {self.heads}")

    def params(self, dtype: torch.dtype, precision: Precision | None = None) -> Params:
        """The leaves on the meta device; a unit a block, one the embedding, one the head with the
        last norm."""
        leaves: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, self.width)}
        units = [UnitSpec("embed", ("embed",), ("embed.weight",))]
        for i in range(self.layers):
            block = {f"blocks.{i}.{name}.weight": shape for name, shape in self._block().items()}
            units.append(UnitSpec(f"blocks.{i}", (f"blocks.{i}",), tuple(block)))
            leaves |= block
        last = {"norm.weight": (self.width,)} | (
            {} if self.tied else {"head.weight": (self.vocab, self.width)}
        )
        units.append(
            UnitSpec(
                "norm" if self.tied else "norm+head", ("norm", "head")[: len(last)], tuple(last)
            )
        )
        made = {
            name: torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for name, shape in (leaves | last).items()
        }
        if precision is not None:
            units = [replace(unit, precisions=(precision,) * len(unit.leaves)) for unit in units]
        return Params(made, tuple(units))

    def _block(self) -> dict[str, tuple[int, ...]]:
        head_dim = self.head_dim or self.width // self.heads
        inner, kv = self.heads * head_dim, (self.kv_heads or self.heads) * head_dim
        hidden = self.hidden or 4 * self.width
        matrices = {
            "norm1": (self.width,),
            "q": (inner, self.width),
            "k": (kv, self.width),
            "v": (kv, self.width),
            "o": (self.width, inner),
            "norm2": (self.width,),
            "up": (hidden, self.width),
            "down": (self.width, hidden),
        }
        return matrices | ({"gate": (hidden, self.width)} if self.gated else {})


def read_config(path: Path) -> Shape:
    """The counts in a Hugging Face model's config.json.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no JSON; counts are missing or no integers; or it is another kind of
            model: with experts, or an encoder.
    """
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(config).__name__}")
    if odd := [key for key in (*_EXPERTS, "is_encoder_decoder") if config.get(key)]:
        raise ValueError(
            f"{path} is no plain decoder: it has {odd[0]}. Remedy: functorch_zero.plan on the "
            "model itself"
        )
    found: dict[str, int] = {}
    for field, keys in _FIELDS.items():
        values = [config[key] for key in keys if config.get(key)]
        if not values and field in ("layers", "width", "vocab"):
            raise ValueError(f"{path} has none of {', '.join(keys)}")
        if values and type(values[0]) is not int:
            found_as = next(key for key in keys if config.get(key))
            raise ValueError(f"{path}: {found_as} must be an integer, got {values[0]!r}")
        found |= {field: values[0]} if values else {}
    gated = str(config.get("hidden_act", "")).lower() in (
        "silu",
        "swiglu",
        "geglu",
        "gelu_pytorch_tanh",
    )
    # As transformers does
    return Shape(**found, gated=gated, tied=bool(config.get("tie_word_embeddings", True)))


_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "vocab": ("vocab_size",),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
