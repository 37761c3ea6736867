"""Errors for arguments: they name what exists, and read annotations of either kind."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch

from functorch_zero import optim
from functorch_zero.optim.arithmetic import Number


class OfAUser(torch.optim.Adam):
    pass


TORCHS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]


@pytest.mark.parametrize("kind", TORCHS)
def test_an_error_names_our_transform_of_that_name(kind: type) -> None:
    with pytest.raises(TypeError) as caught:
        optim.chain(kind)  # type: ignore[arg-type]
    name, remedy = kind.__name__.lower(), str(caught.value).partition("Remedy: ")[2]
    assert remedy.startswith(f"optim.{name}(...)") == (name in optim.__all__)
    assert remedy.startswith(f"optim.contrib.{name}(...)") == (name in optim.contrib.__all__)


@pytest.mark.parametrize("kind", [*TORCHS, OfAUser])
def test_an_error_names_only_transforms_that_exist(kind: type) -> None:
    with pytest.raises(TypeError) as caught:
        optim.chain(kind)  # type: ignore[arg-type]
    remedy = str(caught.value).partition("Remedy: ")[2]
    names = re.findall(r"(?<![\w.])(?:optim|torch\.optim)\.\w+(?:\.\w+)*", remedy)
    assert names
    for name in names:
        if name.startswith("torch."):
            assert operator.attrgetter(name.removeprefix("torch."))(torch)
        else:
            assert callable(operator.attrgetter(name.removeprefix("optim."))(optim))
    if kind is OfAUser:
        assert f"from_torch({__name__}.OfAUser, ...)" in remedy


def factories() -> dict[str, Any]:
    """A factory with annotations as text, and one with types."""
    source = """
def make(rate: Number | Schedule, eps: float | None = 1.0, inner: Transform = optim.identity()):
    return optim.chain(inner, optim.scale(1.0))
"""
    made = {}
    for kind, head in {"text": "from __future__ import annotations\n", "types": ""}.items():
        known = {"optim": optim, "Schedule": optim.Schedule, "Transform": optim.Transform}
        namespace: dict[str, Any] = {"__name__": __name__, "Number": Number, **known}
        exec(compile(head + source, kind, "exec", dont_inherit=True), namespace)
        made[kind] = optim.named(namespace["make"])
    return made


@pytest.mark.parametrize("kind", ["text", "types"])
def test_annotations_are_read_as_text_and_as_types(kind: str) -> None:
    make = factories()[kind]
    for right in (1, 0.1, torch.tensor(0.1), lambda count: 0.1, optim.linear_schedule(1.0, 0.0, 3)):
        make(right)
    make(0.1, None, optim.clip(1.0))
    for wrong, message in {
        "rate": ("0.1", "rate is no number: expected a number or a schedule, got str '0.1'"),
        "eps": (lambda count: 0.1, "eps is no number: expected a number, got function"),
        "inner": (optim.clip, "inner must be an optim.Transform, got function clip"),
    }.items():
        value, text = message
        with pytest.raises(TypeError, match=text):
            make(**{"rate": 0.1, wrong: value})


def test_a_function_is_no_number_where_no_schedule_will_do() -> None:
    with pytest.raises(
        TypeError, match="adamw's eps is no number: expected a number, got function"
    ):
        optim.adamw(0.1, eps=lambda count: 1.0)  # type: ignore[arg-type]
