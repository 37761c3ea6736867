"""A decoder language model's leaves and units from its counts, without a module."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
        for name in _COUNTS:
            # 0 means "by default" for all that may be left out
            least = 1 if name in (*_REQUIRED, "heads") else 0
            count = getattr(self, name)
            if count < least:
                raise ValueError(f"{name} must be at least {least}, got {count}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide the heads, {self.heads}; got {self.kv_heads}")
        if not self.head_dim and self.width % self.heads:
            raise ValueError(f"heads must divide the width, {self.width}; got {self.heads}")

    def params(self, dtype: torch.dtype, precision: Precision | None = None) -> Params:
        """The leaves on the meta device, with their units, all of one `precision`."""
        # Path -> shape, in the order in which a forward comes to them
        shapes: dict[str, tuple[int, ...]] = {}
        units = []
        for unit in self._units():
            shapes |= unit.shapes
            precisions = () if precision is None else (precision,) * len(unit.shapes)
            units.append(UnitSpec(unit.name, unit.modules, tuple(unit.shapes), precisions))
        leaves = {}
        for path, shape in shapes.items():
            leaves[path] = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        return Params(leaves, tuple(units))

    def _units(self) -> Iterator[_Unit]:
        """The embedding, each block, and the last norm with the head."""
        table = (self.vocab, self.width)  # of the embedding, and of a head of its own
        yield _Unit("embed", ("embed",), {"embed.weight": table})
        for i in range(self.layers):
            name = f"blocks.{i}"
            shapes = {}  # of this block, by path
            for module, shape in (self._attention() | self._feed_forward()).items():
                shapes[f"{name}.{module}.weight"] = shape
            yield _Unit(name, (name,), shapes)
        norm: dict[str, tuple[int, ...]] = {"norm.weight": (self.width,)}
        if self.tied:
            yield _Unit("norm", ("norm",), norm)
        else:
            yield _Unit("norm+head", ("norm", "head"), norm | {"head.weight": table})

    def _attention(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a block's first half, by module."""
        # Some models' heads are wider or narrower than width / heads
        head_dim = self.head_dim or self.width // self.heads
        inner = self.heads * head_dim
        kv = (self.kv_heads or self.heads) * head_dim
        # (out, in), as nn.Linear keeps them
        return {
            "norm1": (self.width,),
            "q": (inner, self.width),
            "k": (kv, self.width),
            "v": (kv, self.width),
            "o": (self.width, inner),
        }

    def _feed_forward(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a block's second half, by module."""
        # The ungated default; gated models name their hidden width
        hidden = self.hidden or 4 * self.width
        shapes: dict[str, tuple[int, ...]] = {
            "norm2": (self.width,),
            "up": (hidden, self.width),
            "down": (self.width, hidden),
        }
        if self.gated:
            shapes["gate"] = (hidden, self.width)
        return shapes


class _Unit(NamedTuple):
    """A unit of the model, and the shapes of its leaves by path."""

    name: str
    modules: tuple[str, ...]  # paths, in the order they are called
    shapes: dict[str, tuple[int, ...]]


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
    # Experts and encoders have leaves that these counts don't describe
    for key in (*_EXPERTS, "is_encoder_decoder"):
        if config.get(key):
            raise ValueError(
                f"{path} is no plain decoder: it has {key}. Remedy: functorch_zero.plan on the "
                "model itself"
            )
    # Fields that the file lacks keep the defaults of `Shape`
    counts: dict[str, int] = {}
    for field, keys in _COUNTS.items():
        count = _count(config, keys, path)
        if count is not None:
            counts[field] = count
        elif field in _REQUIRED:
            raise ValueError(f"{path} has none of {', '.join(keys)}")
    activation = str(config.get("hidden_act", "")).lower()
    tied = bool(config.get("tie_word_embeddings", True))  # where it is not said, as transformers
    return Shape(**counts, gated=activation in _GATED, tied=tied)


def _count(config: dict[str, Any], keys: Sequence[str], path: Path) -> int | None:
    """The count by the first of these names that the file has; None where it has none, or zeros."""
    # Families of models name a count differently
    for key in keys:
        count = config.get(key)
        if not count:  # None and 0 mean the same in these files: the default
            continue
        if type(count) is not int:
            raise ValueError(f"{path}: {key} must be an integer, got {count!r}")
        return count
    return None


# Our counts, and their names in the files of different models
_COUNTS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "vocab": ("vocab_size",),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}
_REQUIRED = ("layers", "width", "vocab")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_GATED = ("silu", "swiglu", "geglu", "gelu_pytorch_tanh")  # activations of gated feed-forwards
