"""`compiled`: a user's own pointwise chain as one kernel, made by torch.compile, for donated
storage.

Note [handed on]: a new state may be an input of the kernel: the last updates, the params, another
leaf of the old state. All of these are written to at the kernel's end, one after another, and torch
2.13 then copies an input that has been written to already. It does so for clones, too, which it
removes; a maximum with itself is a copy that it keeps.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import optree
import torch
from torch import Tensor

from ..._torch_private import can_compile, compile_by_inductor, mark_dynamic
from ...errors import TransformError
from ..across import Fused, Pointwise
from ..base import Transform
from ..naming import named

_numbers = itertools.count()  # one per kernel, over all threads of the process
# Ranks that are threads would each make the kernel that none has made yet
_one_at_a_time = threading.Lock()


@named
def compiled(transform: Transform) -> Transform:
    """A transform that a sharded step which donates its state runs as one kernel, which
    torch.compile makes; elsewhere it runs as given.

    It takes pointwise transforms, and chains of them, that treat all leaves alike. AdamW written by
    hand, say, takes as long as torch's fused one then. At the end of a chain, that end is one
    kernel. The numbers are those of the operators up to rounding. It costs some seconds at the
    first step, once per dtype. It needs the compiler that torch.compile needs: a C++ compiler for
    CPUs, Triton for GPUs. Without one, and in a step that does not donate, the operators run one by
    one.

    Raises:
        TransformError: the transform is not pointwise, or tells leaves apart (`masked`, say:
            compile its inside).

    >>> from functorch_zero import optim
    >>> lion = optim.chain(optim.scale_by_lion(), optim.scale_by_learning_rate(1e-4))
    >>> optimizer = optim.chain(optim.clip_by_global_norm(1.0), compiled(lion))
    """
    # A kernel sees flats, so it takes only functions of any grouping of the leaves
    if transform.plain is None:
        raise TransformError(
            "compiled takes pointwise transforms that treat all leaves alike, and chains of them; "
            f"expected Needs.POINTWISE, got {transform.needs!r}. Remedy: compile the pointwise "
            "end of a chain, as in chain(clip_by_global_norm(1.0), compiled(chain(...)))"
        )
    # `plain` stays: it runs where nothing is donated, and the kernel is compared with it
    fused = Fused(_kernel(transform.plain), _takes, transform.plain, one_by_one=True)
    return replace(transform, fused=fused)


def _kernel(part: Pointwise) -> Callable[[list[Tensor], list[Tensor], Any], Any]:
    """The `update` of a `Fused`, of one flat: it adds the updates to the params, and writes new
    state over the old."""

    # Params and updates (piece,)
    def apply(params: Tensor, updates: Tensor, state: Any) -> list[Tensor]:
        made: Any
        made, new = part.update({0: updates}, state, {0: params})
        # See Note [handed on]
        copies = [torch.maximum(x, x) if x.dim() else x for x in optree.tree_leaves(new)]
        # The kernel adds the updates, so none are written out
        params.add_(made[0].to(params.dtype))
        # Counts are returned as new tensors; state that follows the params is written where it lies
        pairs = zip(optree.tree_leaves(state), copies, strict=True)
        return [now if old.dim() == 0 else old.copy_(now) for old, now in pairs]

    # Made when first run: a plan, or a step that donates nothing, never needs it
    @functools.cache
    def kernel() -> Any:
        # torch limits the kernels of one code object, and remembers by its name which numbers vary.
        # So each kernel has code of its own, by a name of its own
        code = apply.__code__.replace(co_name=f"apply_{next(_numbers)}")
        own = FunctionType(
            code, apply.__globals__, apply.__name__, apply.__defaults__, apply.__closure__
        )
        return torch.compile(own, backend=_backend)

    def update(params: list[Tensor], updates: list[Tensor], state: Any) -> Any:
        # The kernel returns a list, in the order of these leaves, and the structure goes around it
        leaves, structure = optree.tree_flatten(state)
        for flat in (*params, *updates, *leaves):
            if flat.dim():
                mark_dynamic(flat, 0)  # one kernel for all sizes
        with _one_at_a_time:
            new = kernel()(*params, *updates, state)
        return structure.unflatten(new)

    return update


def _backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor for the part of the graph that has elements; it would compute 0-d values (a bias
    correction's power) anew for each element."""
    from torch.fx.passes.split_module import split_module

    # Part 0 has the numbers and runs operator by operator; part 1 has the elements
    split: Any = split_module(graph, graph, lambda node: int(not _is_number(node)))
    elements = split.submod_1
    # Fake tensors: shapes and dtypes of part 1's inputs
    given = [node.meta["example_value"] for node in elements.graph.find_nodes(op="placeholder")]
    elements.forward = compile_by_inductor(elements, given)
    return split


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a node of the graph is 0-d, and made of such only. These run outside of the kernel,
    see `_backend`."""
    value = node.meta.get("example_value")  # as dynamo traced it; the output node has none
    # A reduction's result is 0-d, too, but it is made of elements
    if not isinstance(value, Tensor) or value.dim() > 0:
        return False
    return all(map(_is_number, node.all_input_nodes))


def _takes(param: Tensor) -> bool:
    # Not integers, and only where torch.compile has a compiler
    return param.dtype.is_floating_point and can_compile(param.device.type)
