"""Words for plain data and values that ranks compare, as errors show them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..layout.piece import content_word
from ..params import Story
from ..tree import content_digests, has_values, named_leaves

_MOST = 160  # characters of a value in an error
_SHOWN = 3  # elements of a tensor
# As `content_digests` makes them
_DIGEST = re.compile("[0-9a-f]{16}")


class Absent:
    """Stands for a field that one side does not have."""


def told_apart(ours: Any, theirs: Any) -> tuple[str, str]:
    """Two pieces of plain data that differ, in words. Long ones are told from where they differ."""
    one, two = _in_words(ours), _in_words(theirs)
    pairs = enumerate(zip(one, two, strict=False))
    num_same = next((n for n, (a, b) in pairs if a != b), min(len(one), len(two)))
    is_long = max(len(one), len(two)) > _MOST
    # Else the difference might be cut off at the end
    if is_long and num_same > _MOST // 2:
        start = num_same - 20
        one, two = f"...{one[start:]}", f"...{two[start:]}"
    return _shortened(one), _shortened(two)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


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
    if len(value) == 1:
        [(name, settings)] = value.items()
        if isinstance(settings, dict):
            return f"{name}({_settings_in_words(settings)})"
    rows = [f"{key}: {_in_words(own)}" for key, own in value.items()]
    return f"{{{', '.join(rows)}}}"


def _settings_in_words(settings: dict[str, Any]) -> str:
    """The settings of a thing that has a name, an optimizer say; the parts of a chain, which are
    numbered, without their numbers."""
    told = []
    for key, value in settings.items():
        words = _in_words(value)
        told.append(words if key.isdigit() else f"{key}={words}")
    return ", ".join(told)


def told_values(tree: Any) -> dict[str, str]:
    """Words for the values of a tree's tensors, by path: equal where these are equal to the bit.
    Waits for a device."""
    leaves = named_leaves(tree).items()
    tensors = {path: x for path, x in leaves if isinstance(x, Tensor) and has_values(x)}
    words = {path: values_in_words(x) for path, x in tensors.items()}
    # Of those whose words leave elements out
    some = {path: x for path, x in tensors.items() if x.numel() > _SHOWN or not _is_dense(x)}
    for path, digest in content_digests(some).items():
        words[path] += f", digest {digest}"
    return words


def told_story(story: Story) -> dict[str, Any]:
    """Words for how a tree was made, by leaf, and for the numbers on a device that it was made
    with. Waits for the device."""
    numbers = [content_word(number, look=True) for number in story.unread]
    return {**story.tell(), "its numbers": numbers}


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
