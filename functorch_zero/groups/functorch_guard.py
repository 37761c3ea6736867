"""Raw collectives inside a torch.func transform: torch runs them on the wrapped values and
differentiates to zero.

Nothing in torch says so, and the gradients are silently wrong. So while any functorch transform is
active, the c10d operators are made to raise. It costs nothing otherwise: the kernels sit at
functorch's own dispatch key.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

import torch

from .._torch_private import transforms_active

# Of the namespace c10d; those that a release of torch lacks are passed over
_OPERATORS = (
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "broadcast_",
    "reduce_",
    "gather_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
)


@cache
def refuse_collectives_in_transforms() -> Any:
    """Install the kernels, once; the returned library keeps them."""
    # This key comes before the backends', and only while a transform is active
    library = torch.library.Library("c10d", "IMPL", "FuncTorchDynamicLayerFrontMode")
    for name in _OPERATORS:
        if hasattr(torch.ops.c10d, name):
            library.impl(name, _refuser(f"c10d::{name}"))
    return library


def refuse_in_transform(name: str) -> None:
    """Refuse a collective inside of a transform before it asks where its tensors lie: wrapped
    values lie nowhere."""
    # Checked by hand: `data_ptr` comes before any operator that the kernels could catch
    if transforms_active():
        _refuser(name)()


def _refuser(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"the collective {name} was called inside a torch.func transform (grad, vmap, jvp, "
            "...), where its gradient would silently be zero. Remedy: call it outside the "
            "transform, and let fz.shard place the collectives that training needs"
        )

    return refuse
