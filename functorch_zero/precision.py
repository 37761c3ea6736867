"""`Precision`: the dtypes that a model's leaves take on from where they are stored to where they
are used, and back.

A leaf is *stored* in one dtype, travels in another (*gather*), and is used in a third (*compute*).
Its gradient comes in the compute dtype, is summed over ranks in a fourth (*reduce*), and reaches
the optimizer in the storage dtype. The same roundings are made where nothing travels, in one
process too, so that numbers don't depend on the level.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .compress import Form, check_codec, dtype_of
from .errors import explain

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """A policy: one dtype for each thing that happens to a leaf. It concerns floating-point leaves
    only.

    FairScale's `mixed_precision` is `Precision(compute=torch.float16, reduce=torch.float16)`, its
    `fp32_reduce_scatter` `reduce=None`; FSDP's `param_dtype`, `reduce_dtype` and `output_dtype` are
    `compute`, `reduce` and `output`.

    Attributes:
        storage: the dtype of the params in the state (the masters), which the optimizer sees. None:
            as the module has them.
        compute: the dtype of the whole leaves that a module's forward works with. Floating-point
            tensors given to a module that holds leaves are cast to it. None: the storage dtype, and
            inputs stay as they are.
        gather: the dtype in which leaves travel to be made whole; they are rounded to it. Or a
            codec, such as `compress.Blocks(torch.int8, 256)`, which they are rounded by in the
            storage dtype. None: storage or compute, whichever takes fewer bytes (compute if neither
            does), which rounds nothing more.
        reduce: the dtype in which gradients are summed over ranks; they are rounded to it. Or a
            codec: each rank's are rounded once, and summed in the storage dtype. None: the storage
            dtype.
        buffers: the dtype of floating-point buffers, in the state and in use. None: as the module
            has them.
        output: the dtype that floating-point outputs are cast to, of the module that the policy is
            given for. None: they stay as they are.

    >>> Precision(compute=torch.bfloat16, output=torch.float32).dtypes(torch.float32)
    Dtypes(compute=torch.bfloat16, gather=torch.bfloat16, reduce=torch.float32)
    """

    storage: torch.dtype | None = None
    compute: torch.dtype | None = None
    gather: Form | None = None
    reduce: Form | None = None
    buffers: torch.dtype | None = None
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is None or given in FLOATS:
                continue
            if field.name in ("gather", "reduce") and not isinstance(given, torch.dtype):
                check_codec(f"Precision.{field.name}", given)
                continue
            raise ValueError(
                explain(
                    f"Precision.{field.name}",
                    expected=", ".join(map(short, FLOATS)),
                    got=repr(given),
                    remedy="take one of these: sums and products of other dtypes are not defined "
                    "on every device",
                )
            )

    def dtypes(self, storage: torch.dtype) -> Dtypes | None:
        """The dtypes that a leaf stored in `storage` takes on; None: it stays in that one
        throughout."""
        if not storage.is_floating_point:
            return None
        # Of integers nothing is cast; of floats what is not given follows from storage
        compute = self.compute or storage
        # Fewer bytes to send; the leaf is rounded to the other dtype on one end or the other
        narrower = storage if storage.itemsize < compute.itemsize else compute
        # A given dtype counts; else nothing more is rounded than the two ends ask for
        found = Dtypes(compute, self.gather or narrower, self.reduce or storage)
        unchanged = Dtypes(storage, storage, storage)
        # So that such leaves need no casts, and share a bucket with those without a policy
        return None if found == unchanged else found


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a leaf beside the one it is stored in."""

    compute: torch.dtype  # of the whole leaf in a module's forward, and of its gradient there
    gather: Form  # in which the leaf travels to be made whole
    reduce: Form  # in which its gradient travels, and, if a dtype, is summed over ranks

    def narrows(self, storage: torch.dtype) -> bool:
        """Whether a leaf stored in `storage` is gathered in fewer bytes than it is stored in; by a
        codec, it is taken to be."""
        by_codec = not isinstance(self.gather, torch.dtype)
        return by_codec or dtype_of(self.gather, storage).itemsize < storage.itemsize

    def __str__(self) -> str:
        gather, reduce = short(self.gather), short(self.reduce)
        return f"{short(self.compute)}, gathered as {gather}, reduced as {reduce}"


def short(form: Form) -> str:
    """A dtype's name without the library's; a codec as it prints, without its place in memory."""
    text = str(form).removeprefix("torch.")
    # Python's default, "<module.Class object at 0x...>": ranks compare this text
    return type(form).__name__ if text.endswith(f"at {hex(id(form))}>") else text
