"""Each private name of torch does what its function says."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from functorch_zero import _torch_private as private
from tests.tiers import THOROUGH

ROOT = Path(__file__).parents[1]


def in_new_process(code: str) -> list[str]:
    """The lines that it prints."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100, cwd=ROOT)
    return run.stdout.splitlines()


# ---- Tensors ----


def test_base_of() -> None:
    whole = torch.zeros(6)
    assert private.base_of(whole) is None
    assert private.base_of(whole[1:]) is whole
    assert private.base_of(whole[1:].view(5, 1)[2:]) is whole  # the root, not the view between


def test_version_of() -> None:
    x = torch.zeros(3)
    before = private.version_of(x)
    x[:1].add_(1)
    assert private.version_of(x) == private.version_of(x[1:]) == before + 1
    with torch.inference_mode():
        untracked = torch.zeros(3)
    with pytest.raises(RuntimeError, match="Inference tensors"):
        private.version_of(untracked)


def test_storage_id() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    assert private.storage_id(x) == private.storage_id(x[2:]) == private.storage_id(x.detach())
    assert private.storage_id(x) != private.storage_id(y)
    blank, other = torch.zeros(4, device="meta"), torch.zeros(4, device="meta")
    assert blank.data_ptr() == other.data_ptr()
    assert private.storage_id(blank) != private.storage_id(other)


def test_neg_view() -> None:
    x = torch.arange(3.0)
    negative = private.neg_view(x)
    assert negative.is_neg() and negative.tolist() == [0, -1, -2]
    assert private.storage_id(negative) == private.storage_id(x)


def test_is_fake_and_its_mode() -> None:
    with private.FakeTensorMode():
        fake = torch.zeros(2, 3)
    assert private.is_fake(fake) and fake.shape == (2, 3) and fake.device.type == "cpu"
    assert not private.is_fake(torch.zeros(2))
    assert not private.is_fake(torch.zeros(2, device="meta"))


class Wrapped(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(func)


def test_make_wrapper() -> None:
    size = (2**50, 3)  # more than there is room for
    dtype, device = torch.bfloat16, torch.device("cpu")
    made = private.make_wrapper(
        Wrapped, size, None, None, None, dtype, torch.strided, device, False, True
    )
    assert type(made) is Wrapped
    assert (made.shape, made.dtype, made.device) == (size, dtype, device)
    assert made.requires_grad and made.is_leaf


class Marked(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "asked"


def test_without_torch_function() -> None:
    marked = torch.ones(2).as_subclass(Marked)
    assert marked + 1 == "asked"
    with private.without_torch_function():
        made = marked + 1
    assert type(made) is Tensor and made.tolist() == [2, 2]
    assert marked + 1 == "asked"


def test_has_grad_hooks() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not private.has_grad_hooks(x)
    for register in (x.register_hook, x.register_post_accumulate_grad_hook):
        handle = register(lambda *args: None)
        assert private.has_grad_hooks(x)
        handle.remove()
        assert not private.has_grad_hooks(x)


# ---- Random numbers ----


def test_generator_of() -> None:
    cpu = torch.device("cpu")

    def drawn(seed: int) -> Tensor:
        return torch.rand(1000, generator=private.generator_of(seed, cpu), dtype=torch.float64)

    assert torch.equal(drawn(5), drawn(5))
    # torch's own seeding takes 32 bits of a seed, which here would be the same
    seeds = 5, 5 + 2**32, 5 + 2**62
    own = [torch.rand(9, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    assert torch.equal(own[0], own[1]) and torch.equal(own[0], own[2])
    made = torch.stack([drawn(seed) for seed in (*seeds, 6, 0)])
    assert (torch.corrcoef(made) - torch.eye(5, dtype=torch.float64)).abs().max() < 0.15
    assert (made.mean(1) - 0.5).abs().max() < 0.05


def test_the_words_of_a_generators_state() -> None:
    """The first is the seed, and the others follow as in the Mersenne twister's paper."""
    state = torch.Generator().manual_seed(5).get_state()
    words = state[private._WORDS].view(torch.int64).tolist()
    expected = [5]
    for n in range(1, 624):
        before = expected[-1]
        expected.append((1812433253 * (before ^ before >> 30) + n) % 2**32)
    assert words == expected


# ---- Modules ----


def test_params_dict() -> None:
    model = nn.Linear(2, 1, bias=False)
    weight = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(TypeError, match="Parameter"):
        model.weight = weight * 2
    private.params_dict(model)["weight"] = weight * 2
    model(torch.ones(2)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[2, 2]]
    assert private.params_dict(nn.Linear(2, 1, bias=False))["bias"] is None


def test_buffers_dict() -> None:
    model = nn.BatchNorm1d(2).eval()
    private.buffers_dict(model)["running_mean"] = torch.tensor([3.0, 5.0])
    assert dict(model.named_buffers())["running_mean"].tolist() == [3, 5]
    torch.testing.assert_close(model(torch.tensor([[3.0, 5.0]])), torch.zeros(1, 2))
    assert not private.buffers_dict(nn.Sequential(model))  # its own only


def test_registered() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    held = private.registered(model[0])
    assert all(any(own is each for each in vars(model[0]).values()) for own in held)
    params, buffers, modules = held
    assert set(params) == {"weight", "bias"} and "running_mean" in buffers and not modules
    assert [*private.registered(model)[2]] == ["0"]


def test_not_persistent() -> None:
    model = nn.BatchNorm1d(2)
    assert private.not_persistent(model) == set()
    model.register_buffer("table", torch.ones(2), persistent=False)
    assert private.not_persistent(model) == {"table"} and "table" not in model.state_dict()


def test_has_forward_pre_hooks() -> None:
    model = nn.Linear(2, 1)
    model.register_forward_hook(lambda *args: None)
    assert not private.has_forward_pre_hooks(model)
    handle = model.register_forward_pre_hook(lambda *args: None)
    assert private.has_forward_pre_hooks(model)
    handle.remove()
    assert not private.has_forward_pre_hooks(model)


def test_version_counter() -> None:
    x = torch.ones(3)
    before = private.version_of(x)
    counter = private.version_counter(x)
    assert counter.numel() == 0 and private.version_of(counter) == before
    x[1:].add_(1)
    assert private.version_of(counter) == private.version_of(x) == before + 1
    assert private.storage_id(counter) != private.storage_id(x)


def test_has_backward_hooks() -> None:
    model = nn.Linear(2, 1)
    model.register_forward_hook(lambda *args: None)
    assert not private.has_backward_hooks(model)
    for register in (model.register_full_backward_hook, model.register_full_backward_pre_hook):
        handle = register(lambda *args: None)
        assert private.has_backward_hooks(model)
        handle.remove()
        assert not private.has_backward_hooks(model)


# ---- Trees ----


class Pair:
    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second


def test_register_in_torch() -> None:
    private.register_in_torch(
        Pair, lambda pair: ([pair.first, pair.second], None), lambda leaves, _: Pair(*leaves)
    )
    pair = Pair(torch.tensor(3.0), torch.tensor(5.0))
    grads = torch.func.grad(lambda p: p.first * p.second)(pair)
    assert isinstance(grads, Pair) and (grads.first, grads.second) == (5, 3)


def test_map_tensors() -> None:
    tree = {"a": [torch.tensor(2), "text", None], "b": (torch.return_types.max, 7)}
    made = private.map_tensors(lambda x: x + 1, tree)
    assert made == {"a": [torch.tensor(3), "text", None], "b": (torch.return_types.max, 7)}
    pair = private.map_tensors(lambda x: -x, torch.max(torch.tensor([[1, 4]]), 1))
    assert isinstance(pair, torch.return_types.max) and pair.values.tolist() == [-4]


# ---- Autograd ----


class Noting(torch.autograd.Function):
    """Notes in `seen` the number of the backward pass, and the number of the running node."""

    seen: list[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Noting.seen.append((private.backward_number(), private.running_node_number()))
        return grad


def noted(x: Tensor) -> Tensor:
    return Noting.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_next_node_number() -> None:
    x = torch.ones((), requires_grad=True)
    first = private.next_node_number()
    with torch.no_grad():
        x * 2
    assert private.next_node_number() == first
    x * 2
    assert private.next_node_number() == first + 1


def test_running_node_number_is_the_one_that_was_next() -> None:
    x = torch.ones((), requires_grad=True)
    Noting.seen, numbers, y = [], [], x
    for _ in range(3):
        numbers.append(private.next_node_number())
        y = noted(y) * 2
    assert private.running_node_number() is None
    y.backward()
    assert [number for _, number in Noting.seen] == numbers[::-1]
    assert private.running_node_number() is None


def test_backward_number() -> None:
    Noting.seen = []
    x = torch.ones((), requires_grad=True)
    y = noted(x)
    assert private.backward_number() == private.NO_BACKWARD
    y.backward()
    assert [number >= 0 for number, _ in Noting.seen] == [True]
    assert private.backward_number() == private.NO_BACKWARD


def test_innermost_saved_tensors_hooks() -> None:
    outer, inner = (lambda x: x, lambda x: x), (lambda x: x, lambda x: x)
    assert private.innermost_saved_tensors_hooks() is None
    with saved_tensors_hooks(*outer):
        with saved_tensors_hooks(*inner):
            assert private.innermost_saved_tensors_hooks() == inner
        assert private.innermost_saved_tensors_hooks() == outer
    assert private.innermost_saved_tensors_hooks() is None


def test_recompute() -> None:
    found = []

    def note(x: Tensor) -> Tensor:
        found.append(private.innermost_saved_tensors_hooks())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(note, x, use_reentrant=False).sum().backward()
    with save_on_cpu():
        note(x)
    assert [private.recompute(hooks) for hooks in found if hooks] == [True, True, False]


def test_in_custom_function() -> None:
    found: list[bool] = []

    def note(x: Tensor) -> Tensor:
        found.append(private.in_custom_function())
        return x * 2

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return note(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return note(grad)

    class SetUpApart(torch.autograd.Function):
        @staticmethod
        @torch.no_grad()
        def forward(x: Tensor) -> Tensor:
            return note(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    x = torch.ones(2, requires_grad=True)
    note(x)
    Doubled.apply(x).sum().backward()
    SetUpApart.apply(x)
    torch.no_grad()(note)(x)
    torch.func.vmap(note)(x)
    torch.func.jvp(note, (x,), (x,))
    torch.inference_mode()(note)(x)
    assert found == [False, True, False, True, False, False, False, False]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_function_of() -> None:
    x = Twice.apply(torch.ones(2, requires_grad=True))
    assert private.function_of(x.grad_fn) is Twice
    assert private.function_of((2 * x).grad_fn) is None


def test_autograd_calls_a_nodes_own_apply() -> None:
    """`runtime/two_seeds.py` puts one on nodes of custom functions."""
    x = torch.ones(2, requires_grad=True)
    made = Twice.apply(x)
    made.grad_fn.apply = lambda grad: 5 * grad
    (grad,) = torch.autograd.grad(made.sum(), [x])
    assert grad.tolist() == [5, 5]


def test_hooks_registered() -> None:
    before = private.hooks_registered()
    x = torch.ones(2, requires_grad=True) * 2
    x.register_hook(lambda grad: None)
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda made, given: None)
    assert private.hooks_registered() - before == 2


def test_module_hooks_of() -> None:
    module = nn.Tanh()
    module.register_full_backward_hook(print)
    made = module(torch.ones(2, requires_grad=True))
    own = made.grad_fn.register_hook(lambda made, given: None)
    (hook, _) = own.hooks_dict_ref().values()
    found = private.module_hooks_of(hook)
    assert found is not None and found.user_hooks == [print] and found.module is module
    assert private.module_hooks_of(print) is None


def test_in_forward_ad() -> None:
    def elsewhere() -> bool:
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(private.in_forward_ad()))
        thread.start()
        thread.join()
        return found[0]

    assert not private.in_forward_ad()
    with forward_ad.dual_level():
        assert private.in_forward_ad() and elsewhere()
    assert not private.in_forward_ad()


def test_profiler_enabled() -> None:
    assert not private.profiler_enabled()
    with torch.profiler.profile(acc_events=True):  # torch 2.11 warns without
        assert private.profiler_enabled()
    assert not private.profiler_enabled()


# ---- torch.func ----


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_active(transform: Any) -> None:
    found: list[bool] = []

    def function(x: Tensor) -> Tensor:
        found.append(private.transforms_active())
        return x.sum()

    transform(function)(torch.ones(2))
    assert found == [True] and not private.transforms_active()


def test_unwrapped() -> None:
    kept: list[Tensor] = []

    def square(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return x.square().sum()

    torch.func.grad(square)(torch.ones(2))
    with pytest.raises(NotImplementedError):
        private.storage_id(kept[0])
    whole = private.unwrapped(kept[0])
    assert private.storage_id(whole) and whole.equal(torch.full((2,), 2.0))
    assert private.unwrapped(whole) is whole


def test_outside_transforms() -> None:
    weight, made = torch.ones(2, requires_grad=True), []

    def function(x: Tensor) -> Tensor:
        with private.outside_transforms():
            assert not private.transforms_active()
            made.append(weight * 2)
        assert private.transforms_active()
        return (x * made[0].detach()).sum()

    assert torch.func.grad(function)(torch.ones(2)).tolist() == [2, 2]
    made[0].sum().backward()  # autograd has recorded it, and the transform has not wrapped it
    assert weight.grad is not None and weight.grad.tolist() == [2, 2]


# ---- Operators ----

MODES = """
import sys, torch
from functorch_zero._torch_private import QuickDispatchMode, TorchDispatchMode

seen = []
def run(mode):
    class Seeing(mode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))
    with Seeing():
        torch.ones(2) + 1
    print(seen[-1] is torch.ops.aten.add.Tensor, "torch._dynamo" in sys.modules)

run(QuickDispatchMode)
run(TorchDispatchMode)
"""


@THOROUGH
def test_a_quick_dispatch_mode_does_without_dynamo() -> None:
    """The second line is why there is one: without it, `TorchDispatchMode` would do."""
    assert in_new_process(MODES) == ["True False", "True True"]


class Seeing(private.QuickDispatchMode):
    """Notes every operator in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_arguments_of() -> None:
    target, source, _ = private.arguments_of(torch.ops.aten.copy_.default)
    assert (target.name, source.name) == ("self", "src")
    assert target.alias_info.is_write and source.alias_info is None
    *_, out = private.arguments_of(torch.ops.aten.mul.out)
    assert out.is_out and out.alias_info.is_write and not target.is_out


def test_written_of() -> None:
    a, b, out = torch.ones(1), torch.ones(1), torch.ones(1)
    assert private.written_of(torch.ops.aten.add.Tensor, (a, b), {}) == []
    (target,) = private.written_of(torch.ops.aten.copy_.default, (a, b), {})
    assert target is a
    (target,) = private.written_of(torch.ops.aten.add.out, (a, b), {"out": out})
    assert target is out


def test_reads_number() -> None:
    x = torch.ones(())
    with Seeing() as mode:
        for ask in (Tensor.item, bool, float):
            ask(x)
    assert len(mode.seen) == 3 and all(map(private.reads_number, mode.seen))
    assert not private.reads_number(torch.ops.aten.add.Tensor)


@pytest.mark.parametrize("ask", [Tensor.item, Tensor.nonzero])
def test_value_needed(ask: Any) -> None:
    with private.FakeTensorMode():
        fake = torch.ones(())
        with pytest.raises(private.VALUE_NEEDED):
            ask(fake)


# ---- torch.compile ----


@THOROUGH
def test_is_compiled() -> None:
    model = nn.Linear(2, 2)
    assert not private.is_compiled(model)
    assert private.is_compiled(torch.compile(model)) and not private.is_compiled(model)
    model.compile()
    assert private.is_compiled(model)


def test_dynamo_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert not private.dynamo_imported()
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    assert private.dynamo_imported()


def test_unhidden(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.optim.Optimizer.zero_grad
    param = torch.ones(2, requires_grad=True)
    param.grad = torch.ones(2)
    optimizer = torch.optim.SGD([param])
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    private.unhidden(hidden)(optimizer)
    assert param.grad is None and "torch._dynamo" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    assert private.unhidden(hidden) is hidden


def test_run_untraced() -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x * 2

    def outer(x: Tensor) -> Tensor:
        return inner(x) + 1

    private.run_untraced(outer)
    assert torch.compile(outer, backend=backend)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert graphs == []
    assert torch.compile(inner, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(graphs) == 1


def test_load_hooks() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    assert private.load_hooks(optimizer) == ([], [])

    def hook(*args: Any) -> None:
        pass

    def first(*args: Any) -> None:
        pass

    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.register_load_state_dict_pre_hook(first, prepend=True)
    handle = optimizer.register_load_state_dict_post_hook(hook)
    assert private.load_hooks(optimizer) == ([first, hook], [hook])
    handle.remove()
    assert private.load_hooks(optimizer) == ([first, hook], [])


@pytest.mark.parametrize(("marked", "num_graphs"), [(True, 1), (False, 2)])
def test_mark_dynamic(marked: bool, num_graphs: int) -> None:
    torch.compiler.reset()  # what dynamo has learned of the lambda's sizes
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend)
    for size in (3, 4, 5):
        x = torch.ones(size)
        if marked:
            private.mark_dynamic(x, 0)
        assert compiled(x).tolist() == [2.0] * size
    assert len(graphs) == num_graphs


INDUCTOR = """
import torch
from functorch_zero._torch_private import compile_by_inductor

kernels = []
def backend(graph, inputs):
    kernels.append(compile_by_inductor(graph, inputs))
    return kernels[-1]

made = torch.compile(lambda x: torch.sin(x) * 2, backend=backend)(torch.arange(5.0))
torch.testing.assert_close(made, torch.sin(torch.arange(5.0)) * 2)
print(len(kernels), isinstance(kernels[0], torch.fx.GraphModule))
"""


@THOROUGH
def test_compile_by_inductor() -> None:
    """In a process of its own, since inductor leaves threads behind."""
    if not private.can_compile("cpu"):
        pytest.skip("needs a C++ compiler")
    assert in_new_process(INDUCTOR)[-1] == "1 False"


def test_options_of_mode() -> None:
    assert private.options_of_mode("default", None) == {}
    options = private.options_of_mode("max-autotune", None)
    assert options["max_autotune"] is True and "triton.cudagraphs" in options


def test_can_compile() -> None:
    can_compile_anew = private.can_compile.__wrapped__
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert not can_compile_anew("cpu")
    with torch._inductor.config.patch({"cpp.cxx": (sys.executable,)}):  # anything that runs
        assert can_compile_anew("cpu")
    if not torch.cuda.is_available():
        assert not can_compile_anew("cuda")


def test_memory_of_region() -> None:
    """One dict per region of a checkpoint, in its first run and in backward."""
    found: list[Any] = []

    def region(x: Tensor) -> Tensor:
        hooks = private.innermost_saved_tensors_hooks()
        assert hooks is not None
        found.append((private.memory_of_region(hooks), hooks[0]))
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    checkpoint(region, x, use_reentrant=False).sum().backward()
    checkpoint(region, x, use_reentrant=False)
    (first, run), (second, other_run), (another, _) = found
    assert first is second is not None and run is not other_run and another is not first
    with save_on_cpu():
        hooks = private.innermost_saved_tensors_hooks()
    assert hooks is not None and private.memory_of_region(hooks) is None
