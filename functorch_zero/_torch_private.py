"""Private names of torch: all that the package uses, one function each, torch's own where it will
do.

All of them are in torch 2.11, 2.12 and 2.13. Any release of torch may change one, without notice;
`tests/test_torch_private.py` checks the promise of each function.

Two kinds of names are not here. Those of torch.distributed are in `groups/torch_distributed.py`.
`torch._foreach_*`, which torch's documentation lists, and `torch._fused_*` count as public.

Importing torch._dynamo or torch._inductor takes seconds, so only functions do it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.hooks import BackwardHook, RemovableHandle

# ---- Tensors ----

# The tensor that this one is a view of, or None. In public, a tensor doesn't say.
# An attrgetter, so that `map` reads many without a line of Python for each.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")

# How often a tensor, or another one of the same storage, has been written to. Torch's public
# `increment_version` only raises it. Tensors of inference mode have none and raise RuntimeError.
version_of: Callable[[Tensor], int] = attrgetter("_version")


def version_counter(x: Tensor) -> Tensor:
    """An empty tensor that counts the writes to another one, whose storage it doesn't keep."""
    counter = x.detach()  # shares the counter and the storage
    counter.data = x.new_empty(0)  # another storage, and the same counter
    return counter


def has_grad_hooks(x: Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` gave a tensor hooks.

    In public they are only registered.
    """
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


# A number of the storage that a tensor lies in, its own while the storage lives. The public
# `data_ptr()` is 0 for every tensor without values. Torch's own function makes no Python object
# of the storage; saved-tensor hooks ask it of each tensor that a loss saves.
storage_id: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


# The negative of a tensor, as a view of it: the sign is a flag. In public only `imag` of a lazily
# conjugated tensor makes one.
neg_view: Callable[[Tensor], Tensor] = torch._neg_view


# The functions that a tensor's gradient goes through, by number; None without any. In public, hooks
# are only added.
hooks_of: Callable[[Tensor], Any] = attrgetter("_backward_hooks")


def is_fake(x: Tensor) -> bool:
    """Whether a tensor is a FakeTensor: a shape, a dtype and the device it claims, without values.

    The class has no public name.
    """
    return isinstance(x, FakeTensor)


# (class, shape, None, None, None, dtype, layout, device, pin_memory, requires_grad) -> a tensor of
# that class without storage. Torch's guide to subclasses says to use it; it has no public name.
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


# For a tensor subclass that sees operators and no functions of torch's: the guide to subclasses
# names it, and it has no public name.
disabled_torch_function = torch._C._disabled_torch_function_impl


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside, `__torch_function__` of tensor subclasses is not called.

    The public `Tensor.__torch_function__` does this too, but wraps its result in the subclass.
    """
    return torch._C.DisableTorchFunctionSubclass()


# ---- Random numbers ----


def generator_of(seed: int, device: torch.device) -> torch.Generator:
    """A generator that all 63 bits of a seed decide.

    On the CPU, torch's own seeding looks at 32 bits, so that among 100,000 seeds two would make the
    same numbers. The state's format has no public description: bytes, of which `_WORDS` are the
    Mersenne twister's 624 words of 32 bits, each in an int64.
    """
    if device.type != "cpu":
        return torch.Generator(device).manual_seed(seed)
    generator = torch.Generator("cpu")
    state = generator.manual_seed(seed & 2**32 - 1).get_state()  # (5056,) uint8
    of_high_bits = generator.manual_seed(seed >> 32).get_state()
    # The sum: the twister is linear in bits, and so would be relations between exclusive ors
    words = state[_WORDS].view(torch.int64)
    words.add_(of_high_bits[_WORDS].view(torch.int64)).bitwise_and_(2**32 - 1)
    generator.set_state(state)
    return generator


_WORDS = slice(24, 24 + 624 * 8)


# ---- Modules ----


def params_dict(module: nn.Module) -> dict[str, Any]:
    """A module's own params by attribute, as the module keeps them: it uses a tensor put there.

    The public ways to set a param refuse plain tensors and tensors with a history.
    """
    return module._parameters


def buffers_dict(module: nn.Module) -> dict[str, Any]:
    """A module's own buffers by attribute, as the module keeps them: it uses a tensor put there.

    An entry may be None: a buffer that the module does without. The public `buffers()` and
    `named_buffers()` are read-only.
    """
    return module._buffers


def registered(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A module's own params, buffers and modules by attribute, as the module keeps them.

    Among a module's attributes, these dicts themselves are known by their private names only.
    """
    return module._parameters, module._buffers, module._modules


def not_persistent(module: nn.Module) -> set[str]:
    """The module's own buffers that `state_dict` leaves out, by attribute.

    Hooks of `state_dict` may rename its keys, so these don't tell.
    """
    return module._non_persistent_buffers_set


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Whether hooks run before the module's forward. In public they are only registered."""
    return bool(module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks run in the module's backward. In public they are only registered."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


# ---- Trees ----


def register_in_torch(
    kind: type[Any],
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Make a class a node of torch's own trees, which torch.func and torch.compile look into.

    Args:
        kind: the class.
        flatten: node -> (children, context).
        unflatten: (children, context) -> node.

    The public registration, `torch.export.register_dataclass`, takes dataclasses only.
    """
    torch_pytree.register_pytree_node(kind, flatten, unflatten)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """A tree with `function` of each tensor in its place, other leaves as they are.

    Trees are those of torch's own registry, which is private; Hugging Face's outputs are in it.
    """
    return torch_pytree.tree_map_only(Tensor, function, tree)


# ---- Autograd ----


# The number that autograd gives to the next node that this thread makes; they count up. Autograd
# runs ready nodes from the highest number down. Public nodes don't tell their numbers.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def running_node_number() -> int | None:
    """The number of the node whose backward runs now in this thread; None if none does.

    Numbers are those of `next_node_number`: a node made later has a higher one.
    In public, only hooks that were put on a node before know that it runs.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


# The number of the backward pass that this thread runs, or NO_BACKWARD. Torch has no public
# question for it.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1

# The (pack, unpack) that autograd would save a tensor by now; None without any. The public
# `saved_tensors_hooks` only sets them. Its argument, `ignore_is_tracing`, stays False.
innermost_saved_tensors_hooks: Callable[[], tuple[Any, Any] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)


def recompute(hooks: tuple[Any, Any]) -> bool:
    """Whether saved-tensor hooks are those of `torch.utils.checkpoint`, which keep no tensor and
    run its function again. They are closures of private classes; only their module tells."""
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def memory_of_region(hooks: tuple[Any, Any]) -> dict[str, Any] | None:
    """A dict of this package's own for one region of `torch.utils.checkpoint`, by the saved-tensor
    hooks that are the innermost ones inside of it: the same in its first run and in those in
    backward. It lives as long as the region. None: the hooks are of something else.

    In public, a region's function isn't told which run it is in. The hooks are closures, of the
    region's object in the first run, and later of a weak reference to it.
    """
    if not recompute(hooks):
        return None
    pack = inspect.unwrap(hooks[0])
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells}
    region = found["frame"] if "frame" in found else found["target_frame_ref"]()
    own: dict[str, Any] = vars(region).setdefault("functorch_zero", {})
    return own


def in_custom_function() -> bool:
    """Whether the forward of a custom `autograd.Function` runs now in this thread.

    Torch has no question for it. It runs the forward with forward-mode differentiation switched
    off, which nothing else does but inference mode.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def function_of(node: Any) -> type[Any] | None:
    """The custom `autograd.Function` whose backward a node runs; None: it is an operator's.

    A node's public name is that of the function's class, without its module.
    """
    return getattr(node, "_forward_cls", None)


def hooks_registered() -> int:
    """How many hooks have been registered in this process, on tensors, nodes and modules.

    `RemovableHandle` counts them without saying so in public.
    """
    return RemovableHandle.next_id


def module_hooks_of(hook: Callable[..., Any]) -> BackwardHook | None:
    """Where this hook on a node is one by which torch runs the backward hooks of a module: the
    object that has these.

    In public, hooks of modules are only registered.
    """
    cells = getattr(hook, "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells]
    return found[0] if len(found) == 1 and isinstance(found[0], BackwardHook) else None


def in_forward_ad() -> bool:
    """Whether forward-mode differentiation is on, in any thread: torch has one level for all.

    The public `forward_ad` only enters and leaves it.
    """
    return forward_ad._current_level >= 0


# Whether a profiler of torch records this thread. The public `record_function` doesn't ask: it
# costs some microseconds while nobody profiles.
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


# ---- torch.func ----


# Whether a transform of torch.func (grad, vmap, jvp, ...) is active. In public, none tells.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


# The tensor inside, where a transform that has ended still wraps it; else the same one. Operators
# see through such a wrapper, but it has no storage. In public, only operators tell.
unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, operators run as if no transform of torch.func were active.

    Torch has no public way to leave a transform for a while. Tensors that a transform wraps must
    not be used inside.
    """
    return temporarily_clear_interpreter_stack()


# ---- Operators ----


class QuickDispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` that doesn't import torch._dynamo at its first operator.

    The import keeps torch.compile out of `__torch_dispatch__`: use it where nothing is compiled.
    `TorchDispatchMode` itself has no public module either; the guide to extending torch names it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, wraps `__torch_dispatch__` so that dynamo skips it, and imports dynamo
        return False


def arguments_of(operator: Any) -> Sequence[Any]:
    """An operator's arguments in order, each with a name, its kind of aliasing and whether it is
    an `out`.

    Operators have no public schema.
    """
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


@cache
def _written_by(operator: Any) -> list[tuple[int, str]]:
    """The arguments that an operator writes to, by position and by name."""
    found = []
    for i, argument in enumerate(arguments_of(operator)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append((i, argument.name))
    return found


def written_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Of what an operator is given, by position or by name, all that it writes to."""
    written = _written_by(operator)
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


def reads_number(operator: Any) -> bool:
    """Whether this is the operator that `item()`, `bool(x)` and their like run."""
    return operator is torch.ops.aten._local_scalar_dense.default


# An operator needs values of a fake tensor, or the shape of its result depends on values. They have
# no public names.
VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)


# ---- torch.compile ----


def dynamo_imported() -> bool:
    """Whether torch._dynamo is imported: if not, nothing has been compiled.

    The public functions of torch.compiler import it.
    """
    return "torch._dynamo" in sys.modules


def unhidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch hides from torch.compile, without its hiding where nothing has been
    compiled: its first call would import torch._dynamo.

    Torch's decorator is private, and leaves no other way in.
    """
    if dynamo_imported():
        return function
    inside: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
    return inside


def is_compiled(module: nn.Module) -> bool:
    """Whether this module is torch.compile's around another one, or `module.compile()` was called.

    The class has no public name, and the method leaves its mark on the module.
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return dynamo_imported() and isinstance(module, torch._dynamo.OptimizedModule)


def load_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that an optimizer is to call before it loads a state dict, and behind.

    In public they are only registered; torch's `load_state_dict`, which calls them, casts the state
    to the params' dtypes.
    """
    before = optimizer._optimizer_load_state_dict_pre_hooks
    after = optimizer._optimizer_load_state_dict_post_hooks
    return [*before.values()], [*after.values()]


def run_untraced(function: Callable[..., Any]) -> None:
    """Have torch.compile run a function of Python, and all that it calls, instead of tracing them.

    The public `torch.compiler.disable` imports torch._dynamo.
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    # The first is for the function's own frame, the second for those that it calls
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def mark_dynamic(x: Tensor, dim: int) -> None:
    """Compile no code for this one size of the tensor's dim, but for all sizes.

    torch.compile's `dynamic=True` is public, and makes all dims of all tensors so. Torch's guide to
    dynamic shapes names this function. `torch._dynamo` is imported when it is first named.
    """
    torch._dynamo.mark_dynamic(x, dim)


def compile_by_inductor(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Inductor's compiled function of a graph that dynamo captured, for a backend of one's own that
    changes the graph first.

    Args:
        graph: is called as the result is.
        inputs: its placeholders' example values, fake ones, which tell shapes and dtypes.

    In public, a backend is called by name only, and by torch.compile.
    """
    from torch._dynamo import lookup_backend

    return lookup_backend("inductor")(graph, list(inputs))


def options_of_mode(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """The inductor options that one of torch.compile's modes stands for.

    torch.compile takes a mode or options, so that who adds one must write out the other; its
    documentation names this function.
    """
    from torch._inductor import list_mode_options

    return list_mode_options(mode, dynamic)


@cache
def can_compile(device: str) -> bool:
    """Whether inductor finds a compiler for this kind of device: a C++ compiler, or Triton.

    In public, compiling something and failing tells.
    """
    if device != "cpu":
        from torch.utils._triton import has_triton

        return bool(has_triton())
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False
