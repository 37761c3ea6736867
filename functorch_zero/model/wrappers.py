"""Names of params without those of the wrappers that torch puts around modules."""

from __future__ import annotations

from torch import nn

_OF_FIRST_FSDP = "_fsdp_wrapped_module"
_WRAPPERS = {"_orig_mod", _OF_FIRST_FSDP, "_checkpoint_wrapped_module"}


def without_wrappers(name: str) -> str:
    """The name that a plain module gives a param, without torch.compile's, checkpointing's and
    FSDP's parts."""
    return ".".join(own for own in name.split(".") if own not in _WRAPPERS)


def is_of_first_fsdp(module: nn.Module) -> bool:
    """Whether this is a FullyShardedDataParallel, whose params are plain pieces."""
    return hasattr(module, _OF_FIRST_FSDP)
