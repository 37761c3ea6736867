"""Words for plain data and values that ranks compare, as errors show them."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import optree
import torch
from torch import Tensor

from ..tree import content_digests, has_values, paths

_MOST = 160  # characters of a value in an error
_SHOWN = 3  # elements of a tensor
# As `content_digests` makes them
_DIGEST = re.compile("[0-9a-f]{16}")


class Absent:
    """Stands for a field that one side does not have."""


def told_apart(ours: Any, theirs: Any) -> tuple[str, str]:
    """Two pieces of plain data that differ, in words. Long ones are told from where they differ."""
    texts = _in_words(ours), _in_words(theirs)
    # Up to the first place where they differ
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    if max(map(len, texts)) > _MOST and same > _MOST // 2:
        texts = "..." + texts[0][same - 20 :], "..." + texts[1][same - 20 :]
    one, two = (text if len(text) <= _MOST else text[: _MOST - 3] + "..." for text in texts)
    return one, two


def _in_words(value: Any) -> str:
    """Plain data for people: adamw(learning_rate=0.1)."""
    if value is Absent:
        return "absent"
    if isinstance(value, str):
        return f"digest {value}" if _DIGEST.fullmatch(value) else value or "''"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_words, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    # A thing by name, with its settings
    if len(value) == 1 and isinstance(settings := next(iter(value.values())), dict):
        told = []
        for key, part in settings.items():
            # The parts of a chain are numbered
            label = "" if key.isdigit() else f"{key}="
            told.append(f"{label}{_in_words(part)}")
        return f"{next(iter(value))}({', '.join(told)})"
    return "{" + ", ".join(f"{key}: {_in_words(part)}" for key, part in value.items()) + "}"


def told_values(tree: Any) -> dict[str, str]:
    """Words for the values of a tree's tensors, by path: equal where these are equal to the bit.
    Waits for a device."""
    rows = zip(paths(tree), optree.tree_leaves(tree), strict=True)
    tensors = {path: x for path, x in rows if isinstance(x, Tensor) and has_values(x)}
    words = {path: values_in_words(x) for path, x in tensors.items()}
    # Of those whose words leave elements out
    some = {path: x for path, x in tensors.items() if x.numel() > _SHOWN or not _is_dense(x)}
    for path, digest in content_digests(some).items():
        words[path] += f", digest {digest}"
    return words


def values_in_words(x: Tensor) -> str:
    """A tensor's first values, for errors. Waits for a device."""
    if not _is_dense(x):
        return f"a tensor of shape {(*x.shape,)}, {x.layout}"
    if not x.dim():
        return repr(x.item())
    some = ", ".join(map(repr, x.detach().reshape(-1)[:_SHOWN].tolist()))
    return f"[{some}]" if x.numel() <= _SHOWN else f"[{some}, ...] of {x.numel()} elements"


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided
