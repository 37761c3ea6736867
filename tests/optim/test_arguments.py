"""Errors for arguments: they name what exists, and read annotations of either kind."""

from __future__ import annotations

import operator
import re

import pytest
import torch

from functorch_zero import optim


class OfAUser(torch.optim.Adam):
    pass


TORCHS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]


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
