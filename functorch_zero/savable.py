"""The things that a state may hold: leaves that every checkpoint gives back to the bit."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ._torch_private import is_fake

# By the names that files have for them
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C128": torch.complex128,
    "C64": torch.complex64,
    "C32": torch.complex32,
}
_DTYPES = frozenset(DTYPES.values())
_TENSORS, _NUMBERS = (Tensor, Parameter), (bool, float, str)
_PLAIN = frozenset(_TENSORS)
_IS_NESTED, _LAYOUT, _DTYPE = map(attrgetter, ("is_nested", "layout", "dtype"))
MAX_BITS = 2**13  # of an integer: of much longer ones Python refuses to print and read the digits


class Fault(NamedTuple):
    """Why a leaf can't be saved, in words for errors."""

    expected: str
    got: str
    remedy: str


def fault_of(leaf: Any) -> Fault | None:
    """Why no checkpoint can hold a leaf; None: it can."""
    if isinstance(leaf, Tensor):
        return _fault_of_tensor(leaf)
    kind = type(leaf)
    if kind in _NUMBERS or (kind is int and leaf.bit_length() <= MAX_BITS):
        return None
    return _fault_of_object(leaf)


def are_savable(leaves: Collection[Any]) -> bool:
    """Whether all are tensors that a checkpoint can hold, without a call of Python for each: steps
    ask this of all their leaves. False: `fault_of` is to be asked."""
    return (
        _PLAIN.issuperset(map(type, leaves))
        and not any(map(_IS_NESTED, leaves))
        and {torch.strided}.issuperset(map(_LAYOUT, leaves))
        and _DTYPES.issuperset(map(_DTYPE, leaves))
    )


def _fault_of_tensor(leaf: Tensor) -> Fault | None:
    expected = "a dense tensor, of a dtype that files have"
    if leaf.is_nested:
        return Fault(expected, "a nested tensor", "keep one tensor for each part")
    if leaf.layout != torch.strided:
        remedy = "keep leaf.to_dense(), or its indices and values, and make it sparse where used"
        return Fault(str(torch.strided), str(leaf.layout), remedy)
    if leaf.is_quantized:
        return Fault(expected, "a quantized tensor", "keep leaf.dequantize()")
    if type(leaf) not in _TENSORS and not is_fake(leaf):
        remedy = "keep a plain tensor, and make the subclass of it where it is used"
        return Fault("torch.Tensor", f"a {type(leaf).__name__}", remedy)
    if leaf.dtype in _DTYPES:
        return None
    return Fault(expected, str(leaf.dtype), "keep leaf.view(torch.uint8)")


def _fault_of_object(leaf: Any) -> Fault:
    kind = type(leaf)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if kind is int:
        return Fault(f"at most {MAX_BITS} bits", f"{leaf.bit_length()} bits", "keep a tensor of it")
    return Fault("a tensor, a number or a string", f"a {name}", _remedy_for(leaf, name))


def _remedy_for(leaf: Any, name: str) -> str:
    if hasattr(leaf, "__array__"):
        return "keep torch.as_tensor(leaf), or leaf.item() of a number"
    for plain in (bool, int, float, str):
        if isinstance(leaf, plain):  # a file has no place for the subclass
            return f"keep {plain.__name__}(leaf), and make the {name} of it where it is used"
    if isinstance(leaf, enum.Enum):
        return "keep leaf.name, a string, and make the enum of it where it is used"
    if isinstance(leaf, complex):
        return "keep torch.tensor(leaf, dtype=torch.complex128)"
    if dataclasses.is_dataclass(leaf):
        return (
            "make it a NamedTuple, or a node of trees, by @optree.dataclasses.dataclass(namespace="
            "optree.registry.__GLOBAL_NAMESPACE)"
        )
    if isinstance(leaf, Collection) and not isinstance(leaf, bytes):
        return (
            "keep dicts, lists, tuples and NamedTuples, or make it a node of trees, by "
            "optree.register_pytree_node"
        )
    return "keep what stays as it is outside, where the program closes over it"
