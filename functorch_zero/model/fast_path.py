"""Modules of torch that ask what the params of modules inside are, before they call those.

See Note [asked what it is] in `lazy_param.py`.
"""

from __future__ import annotations

from torch import nn


def asked_about(module: nn.Module) -> nn.Module | None:
    """The module whose params, and those of modules inside it, this one's forward asks about while
    that module is in evaluation mode; None: it doesn't ask."""
    if isinstance(module, nn.TransformerEncoder):
        return next(iter(module.layers), None)
    if isinstance(module, nn.TransformerEncoderLayer | nn.MultiheadAttention):
        return module
    return None
