"""Every module class of torch.nn: sharded it equals unsharded, and that equals torch.

Each rank is given the whole batch, so that batch norms see what they see in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.model.units import Units
from tests.compare import REORDERED
from tests.tiers import THOROUGH, thinned, tiers

LEVELS = (0, 1, 2, 3)
N = 6  # rows
Make = Callable[[], nn.Module]
Inputs = tuple[Any, ...]


def x(*shape: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(N, *shape, dtype=torch.float64, generator=generator)


def labels(*shape: int, below: int = 4) -> Tensor:
    return torch.arange(N * math.prod(shape)).reshape(N, *shape) % below


def signs(*shape: int) -> Tensor:
    return labels(*shape, below=2) * 2.0 - 1


def share(*shape: int) -> Tensor:
    return x(*shape, number=1).sigmoid()


def pooled(dims: int) -> Inputs:
    """A pooled tensor and the places that its values come from."""
    pool: Any = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
    return tuple(pool(x(2, *[4] * dims)))


def packed() -> Any:
    return nn.utils.rnn.pack_padded_sequence(x(5, 3), [5, 5, 4, 3, 2, 1], batch_first=True)


class Sequence(nn.Module):
    """Containers, which have no call of their own, in use: their leaves are the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.listed = nn.ModuleList([nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.values = nn.ParameterList([torch.randn(4)])
        self.by_name = nn.ParameterDict({"b": torch.randn(4)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.named["a"](self.listed[0](self.row(x)))
        result: Tensor = h * self.values[0] + self.by_name["b"]
        return result


def by_dims(name: str, *args: Any, channels: int = 2, size: int = 4) -> dict[str, Any]:
    """Rows for the classes of one, two and three dims."""
    return {
        f"{name}{d}d": (getattr(nn, f"{name}{d}d"), args, (x(channels, *[size] * d),))
        for d in (1, 2, 3)
    }


def alike(names: str, *args: Any, inputs: Inputs) -> dict[str, Any]:
    """Rows for classes that are built and called alike."""
    return {name: (getattr(nn, name), args, inputs) for name in names.split()}


# By class, how it is built, and the inputs of a call
TABLE: dict[str, tuple[Callable[..., nn.Module], tuple[Any, ...], Inputs]] = {
    **by_dims("AdaptiveAvgPool", 2),
    **by_dims("AdaptiveMaxPool", 2),
    **by_dims("AvgPool", 2),
    **by_dims("BatchNorm", 2),
    **by_dims("CircularPad", 1),
    **by_dims("ConstantPad", 1, 0.5),
    **by_dims("Conv", 2, 3, 2),
    **by_dims("ConvTranspose", 2, 3, 2),
    **by_dims("Dropout", 0.0),
    **by_dims("InstanceNorm", 2, 1e-5, 0.1, True, True),
    **by_dims("LPPool", 2.0, 2),
    **by_dims("MaxPool", 2),
    **by_dims("ReflectionPad", 1),
    **by_dims("ReplicationPad", 1),
    **by_dims("ZeroPad", 1),
    **{f"MaxUnpool{d}d": (getattr(nn, f"MaxUnpool{d}d"), (2,), pooled(d)) for d in (1, 2, 3)},
    **alike(
        "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid "
        "Mish PReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink GLU "
        "Flatten",
        inputs=(x(4),),
    ),
    **alike("LogSoftmax Softmax Softmin", 1, inputs=(x(4),)),
    **alike("AlphaDropout Dropout FeatureAlphaDropout", 0.0, inputs=(x(4, 3),)),
    **alike("L1Loss MSELoss HuberLoss SmoothL1Loss", inputs=(x(4), x(4, number=1))),
    **alike("BCELoss", inputs=(share(4), share(4))),
    **alike("BCEWithLogitsLoss", inputs=(x(4), share(4))),
    **alike("CosineEmbeddingLoss", inputs=(x(4), x(4, number=1), signs())),
    **alike("CrossEntropyLoss MultiMarginLoss NLLLoss", inputs=(x(4), labels())),
    **alike("HingeEmbeddingLoss SoftMarginLoss", inputs=(x(4), signs(4))),
    **alike("MultiLabelMarginLoss", inputs=(x(4), labels(4))),
    **alike("MultiLabelSoftMarginLoss", inputs=(x(4), labels(4, below=2))),
    "KLDivLoss": (partial(nn.KLDivLoss, reduction="batchmean"), (), (x(4), share(4))),
    **alike("PoissonNLLLoss", inputs=(x(4), share(4))),
    **alike("GaussianNLLLoss", inputs=(x(4), x(4, number=1), share(4))),
    **alike("MarginRankingLoss", inputs=(x(), x(number=1), signs())),
    **alike(
        "TripletMarginLoss TripletMarginWithDistanceLoss",
        inputs=(x(4), x(4, number=1), x(4, number=2)),
    ),
    **alike("CosineSimilarity PairwiseDistance", inputs=(x(4), x(4, number=1))),
    **alike("Bilinear", 4, 3, 2, inputs=(x(4), x(3, number=1))),
    **alike("Linear", 4, 3, inputs=(x(4),)),
    **alike("LayerNorm RMSNorm", 4, inputs=(x(4),)),
    **alike("GroupNorm", 2, 4, inputs=(x(4, 3),)),
    **alike("CrossMapLRN2d LocalResponseNorm", 3, inputs=(x(4, 3, 3),)),
    **alike("ChannelShuffle PixelShuffle PixelUnshuffle", 2, inputs=(x(4, 4, 4),)),
    **alike("Softmax2d", inputs=(x(4, 3, 3),)),
    **alike("Embedding", 7, 3, inputs=(labels(2),)),
    **alike("EmbeddingBag", 7, 3, inputs=(labels(2),)),
    **alike("GRUCell LSTMCell RNNCell", 4, 3, inputs=(x(4),)),
    **alike("GRU LSTM RNN", 3, 4, 2, inputs=(packed(),)),
    **alike("RReLU", 0.2, 0.2, inputs=(x(4),)),
    **alike("Threshold", 0.1, 0.2, inputs=(x(4),)),
    **alike("Unflatten", 1, (2, 2), inputs=(x(4),)),
    **alike("Fold", (4, 4), 2, inputs=(x(8, 9),)),
    **alike("Unfold", 2, inputs=(x(2, 4, 4),)),
    **alike("Upsample UpsamplingBilinear2d UpsamplingNearest2d", (6, 6), inputs=(x(2, 4, 4),)),
    "CTCLoss": (
        nn.CTCLoss,
        (),
        (
            x(2, 4).log_softmax(2),
            1 + labels(2, below=3)[:2],
            torch.tensor([6, 6]),
            torch.tensor([2, 2]),
        ),
    ),
    **{
        f"FractionalMaxPool{d}d": (
            partial(getattr(nn, f"FractionalMaxPool{d}d"), 2, output_size=2),
            (),
            (x(2, *[4] * d),),
        )
        for d in (2, 3)
    },
    "AdaptiveLogSoftmaxWithLoss": (
        nn.AdaptiveLogSoftmaxWithLoss,
        (4, 8, [2, 5], 2.0),
        (x(4), labels(below=8)),
    ),
    "Sequential": (Sequence, (), (x(3),)),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    TABLE["LinearCrossEntropyLoss"] = (nn.LinearCrossEntropyLoss, (4, 5), (x(4), labels()))
# Classes without a row, and why
APART = {
    **dict.fromkeys(["Module", "Container", "RNNBase", "RNNCellBase"], "only base classes"),
    **dict.fromkeys(
        ["ModuleList", "ModuleDict", "ParameterList", "ParameterDict"], "in the row of Sequential"
    ),
    "LinearCrossEntropyOptions": "no module",
    "NLLLoss2d": "NLLLoss by another name, which warns",
    "SyncBatchNorm": "on GPUs only",
    **dict.fromkeys(
        (name for name in nn.modules.__all__ if name.startswith("Lazy")),
        "refused until it has run, when it is of another class",
    ),
    **dict.fromkeys(
        [
            "MultiheadAttention",
            "Transformer",
            "TransformerDecoder",
            "TransformerDecoderLayer",
            "TransformerEncoder",
            "TransformerEncoderLayer",
        ],
        "in ATTENTION",
    ),
}


class Call(NamedTuple):
    """A call of a module of the net."""

    module: str
    args: Inputs
    kwargs: Mapping[str, Any] = {}


Calls = Mapping[str, Call]  # by a name for errors
HOW = ("trained", "frozen", "without gradients")


class Net(nn.Module):
    """Modules, and a trained factor of all that they give."""

    def __init__(self, modules: Mapping[str, nn.Module], how: str):
        super().__init__()
        self.each = nn.ModuleDict(modules)
        self.each.requires_grad_(how != "frozen")
        self.factor = nn.Parameter(torch.ones(()))
        self.how = how

    def forward(self, calls: Calls) -> dict[str, Tensor]:
        """By call, a number that all of its outputs are in."""
        numbers = {}
        for name, call in calls.items():
            with torch.no_grad() if self.how == "without gradients" else nullcontext():
                output = self.each[call.module](*call.args, **call.kwargs)
            numbers[name] = self.factor * sum(map(_projected, _floats(output)))
        return numbers


def _floats(output: Any) -> list[Tensor]:
    leaves = optree.tree_leaves(output)
    return [y for y in leaves if isinstance(y, Tensor) and y.is_floating_point()]


def _projected(y: Tensor) -> Tensor:
    return (y.flatten() * (1 + torch.arange(y.numel())).cos()).sum()


class Result(NamedTuple):
    numbers: dict[str, Tensor]  # by call
    grads: dict[str, Tensor]  # by path
    buffers: dict[str, Tensor]  # by path, as they are afterwards


def by_torch(net: Net, calls: Calls) -> Result:
    numbers = net(calls)
    torch.stack([*numbers.values()]).sum().backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return Result(numbers, grads, dict(net.named_buffers()))


def by_step(net: Net, calls: Calls, units: Units, level: int | None, ranks: int = 2) -> Result:
    """The same by one step of plain descent, or a sharded one: on its first rank."""
    apply, params, buffers = fz.functionalize(net, units=units)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        numbers, buffers = apply(params, buffers, calls)
        return torch.stack([*numbers.values()]).sum(), fz.Aux(metrics=numbers, buffers=buffers)

    step = fz.train_step(loss_fn, optim.sgd(1.0))

    def result(state: fz.State, metrics: Mapping[str, Tensor]) -> Result:
        grads = {name: p.detach() - state.params[name].detach() for name, p in params.items()}
        return Result(dict(metrics), grads, state.buffers)

    if level is None:
        return result(*step(step.init(params, buffers), torch.ones(N)))

    def on_rank(group: fz.ProcessGroup) -> Result:
        sharded = fz.shard(step, level=level, group=group)
        state, metrics = sharded(sharded.init(params, buffers), torch.ones(N))
        return result(sharded.unshard(state), metrics)

    return run_ranks(on_rank, ranks)[0]


def assert_equal(expected: Result, got: Result) -> None:
    """Of all numbers and gradients; those that torch has no gradient of are zero."""
    for name, number in expected.numbers.items():
        assert torch.isfinite(number), name
        far = (number - got.numbers[name]).abs() / (1 + number.abs())
        assert far < REORDERED, f"{name} is off by {far}"
    for path, grad in got.grads.items():
        want = expected.grads.get(path, torch.zeros(()))
        far = (want - grad).abs().max() / (1 + want.abs().max())
        assert far < REORDERED, f"the gradient of {path} is off by {far}"
    for path, buffer in expected.buffers.items():
        torch.testing.assert_close(got.buffers[path], buffer, msg=lambda text, p=path: p + text)


def check(
    make: Callable[[], Net], calls: Calls, units: Units, levels: Iterable[int], ranks: int = 2
) -> None:
    expected = by_torch(make(), calls)
    whole = by_step(make(), calls, units, None)
    assert_equal(expected, whole)
    for level in levels:
        assert_equal(whole, by_step(make(), calls, units, level, ranks))


def seeded(makes: Mapping[str, Make], how: str, mode: str) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net({name: make() for name, make in makes.items()}, how).double()
        for p in net.each.parameters():  # zeros and ones would hide mistakes
            nn.init.normal_(p, std=0.5)
    return net.train(mode == "training")


def test_every_class_has_a_row() -> None:
    """Also those of a newer torch; an older one lacks some of APART."""
    assert {*nn.modules.__all__} <= TABLE.keys() | APART.keys()
    assert not TABLE.keys() & APART.keys()


@pytest.mark.parametrize("mode", tiers(["training"], ["evaluation"]))
@pytest.mark.parametrize(
    ("how", "levels"),
    tiers(
        [("trained", [3])],
        [("frozen", [3]), ("without gradients", [3])],
        [(how, LEVELS) for how in HOW],
        rows=True,
    ),
)
def test_every_class(how: str, mode: str, levels: list[int]) -> None:
    makes = {name: partial(build, *args) for name, (build, args, _) in TABLE.items()}
    calls = {name: Call(name, inputs) for name, (_, _, inputs) in TABLE.items()}
    check(lambda: seeded(makes, how, mode), calls, None, levels)


@pytest.mark.parametrize("name", [name for name in nn.modules.__all__ if name.startswith("Lazy")])
def test_lazy_classes_are_refused_until_they_have_run(name: str) -> None:
    sizes = () if "Norm" in name else (3, 2)
    model = nn.Sequential(getattr(nn, name)(*sizes))
    with pytest.raises(StructureError, match="run it once before functionalize"):
        fz.functionalize(model)


WIDTH, LENGTH = 4, 5
LENGTHS = torch.tensor([5, 3, 1, 4, 2, 5])  # of the rows' sequences
PADDED = torch.arange(LENGTH) >= LENGTHS[:, None]  # (N, LENGTH)
LATER = torch.ones(LENGTH, LENGTH).triu(1).bool()  # keys that a query must not see
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda mask: mask,
    "float": lambda mask: torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -9.0),
}


def masks(padding: str, causal: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind of mask, by these arguments of a forward."""
    yield "no mask", {}
    for form, made in FORMS.items():
        yield f"{form} {padding}", {padding: made(PADDED)}
        # Before the tokens, as of prompts
        yield f"{form} {padding} first", {padding: made(PADDED.flip(1))}
        yield f"{form} {causal}", {causal: made(LATER)}
        yield f"{form} {padding} and {causal}", {padding: made(PADDED), causal: made(LATER)}


# By class, the masks of its forward: of padding, and of pairs
MASKS = {
    nn.MultiheadAttention: [("key_padding_mask", "attn_mask")],
    nn.TransformerEncoderLayer: [("src_key_padding_mask", "src_mask")],
    nn.TransformerEncoder: [("src_key_padding_mask", "mask")],
    nn.TransformerDecoderLayer: [
        ("tgt_key_padding_mask", "tgt_mask"),
        ("memory_key_padding_mask", "memory_mask"),
    ],
    nn.TransformerDecoder: [
        ("tgt_key_padding_mask", "tgt_mask"),
        ("memory_key_padding_mask", "memory_mask"),
    ],
    nn.Transformer: [
        ("src_key_padding_mask", "src_mask"),
        ("tgt_key_padding_mask", "tgt_mask"),
        ("memory_key_padding_mask", "memory_mask"),
    ],
}


def encoder_layer(heads: int = 2, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        WIDTH, heads, 7, dropout=0.0, **{"batch_first": True} | options
    )


def decoder_layer() -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True)


def attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True} | options)


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(**options), 2, nn.LayerNorm(WIDTH))


ATTENTION: dict[str, Make] = {
    "attention": attention,
    "attention, row by row": lambda: attention(batch_first=False),
    "attention without biases": lambda: attention(bias=False),
    "attention with added keys": lambda: attention(add_bias_kv=True),
    "attention to other widths": lambda: attention(kdim=3, vdim=2),
    "layer": encoder_layer,
    "layer, norm first": lambda: encoder_layer(norm_first=True),
    "layer with gelu": lambda: encoder_layer(activation="gelu"),
    "encoder": encoder,
    "encoder, slow path": lambda: nn.TransformerEncoder(
        encoder_layer(heads=1), 2, enable_nested_tensor=False
    ),
    "decoder layer": decoder_layer,
    "decoder": lambda: nn.TransformerDecoder(decoder_layer(), 2),
    "transformer": lambda: nn.Transformer(WIDTH, 2, 1, 1, 7, dropout=0.0, batch_first=True),
}
# Units, by class; None: the module itself. Leaves in none of them are in other units
INSIDE: dict[str, Units] = {
    "itself": None,
    "encoders": (nn.TransformerEncoder, nn.TransformerDecoder),
    "layers": (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    "attentions": nn.MultiheadAttention,
    "linears": nn.Linear,
    "leaves": (nn.MultiheadAttention, nn.Linear, nn.LayerNorm),
}


def attention_calls(module: nn.Module) -> dict[str, Call]:
    """Calls of a module of torch's, with every kind of mask, by names of these."""
    source, target = x(LENGTH, WIDTH), x(LENGTH, WIDTH, number=1)
    inputs: dict[str, Inputs] = {"": (source, target)}
    if isinstance(module, nn.MultiheadAttention):
        other = source[..., : module.kdim], source[..., : module.vdim]
        inputs = {"of others": (target, *other)}
        if module.kdim == WIDTH:
            inputs["of itself"] = (source, source, source)
        if not module.batch_first:
            inputs = {k: tuple(v.transpose(0, 1) for v in vs) for k, vs in inputs.items()}
    elif isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        inputs = {"": (source,)}
    calls = {}
    for padding, pairs in MASKS[type(module)]:
        for name, given in masks(padding, pairs):
            for kind, args in inputs.items():
                calls[f"{kind} {name}".strip()] = Call("it", args, given)
    return calls


def is_inside(model: nn.Module, units: Units) -> bool:
    """Whether some module with units of that kind is there."""
    return units is None or any(isinstance(module, units) for module in model.modules())


def attention_rows() -> list[Any]:
    """The fast path is the quick rows': in evaluation mode, where no gradient is wanted."""
    quick: list[tuple[str, str, str, str]] = [
        ("attention", "linears", "evaluation", "frozen"),
        ("layer", "linears", "evaluation", "frozen"),
        ("encoder", "layers", "evaluation", "without gradients"),
    ]
    others = [
        ("layer, norm first", "attentions", "evaluation", "trained"),
        ("encoder", "layers", "training", "trained"),
        ("transformer", "layers", "evaluation", "frozen"),
    ]
    every = [
        (name, inside, mode, how)
        for name, make in ATTENTION.items()
        for inside, units in INSIDE.items()
        if is_inside(make(), units)
        for mode in ("training", "evaluation")
        for how in HOW
    ]
    thorough = [
        row for row in every if row[1:] == ("leaves", "evaluation", "frozen") or row in others
    ]
    return tiers(quick, thorough, [row for row in every if row not in quick], rows=True)


def check_attention(
    name: str, inside: str, mode: str, how: str, levels: Iterable[int], ranks: int = 2
) -> None:
    make = partial(seeded, {"it": ATTENTION[name]}, how, mode)
    check(make, attention_calls(ATTENTION[name]()), INSIDE[inside], levels, ranks)


# Torch's own, of nested tensors in its encoder
nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@nested
@pytest.mark.parametrize(("name", "inside", "mode", "how"), attention_rows())
def test_attention(
    name: str, inside: str, mode: str, how: str, request: pytest.FixtureRequest
) -> None:
    full = request.node.get_closest_marker("full") is not None
    levels, ranks = (LEVELS, 3) if full else ([3], 2)
    check_attention(name, inside, mode, how, levels, ranks)


@nested
def test_the_fast_path_gives_other_numbers() -> None:
    """So that the rows above can fail: padded rows are zero in it."""
    make = partial(seeded, {"it": encoder}, "without gradients", "evaluation")
    calls = attention_calls(encoder())
    fast = by_torch(make(), calls)
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        slow = by_torch(make(), calls)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    with pytest.raises(AssertionError, match="src_key_padding_mask is off by"):
        assert_equal(fast, slow)


@nested
@pytest.mark.parametrize(
    ("inside", "gradients"),
    thinned([("layers", True), ("layers", False), ("leaves", False), ("itself", False)], rows=True),
)
def test_an_evaluation_takes_the_fast_path_too(inside: str, gradients: bool) -> None:
    """Also where it enables gradients, by its input say: its params have none."""
    net = seeded({"it": encoder}, "trained", "evaluation")
    calls = attention_calls(encoder())
    apply, params, buffers = fz.functionalize(net, units=INSIDE[inside])
    step = fz.train_step(lambda params, buffers, batch: params["factor"] * 1, optim.sgd(0.1))

    def evaluate(params: Any, buffers: Any, batch: Any) -> Any:
        with torch.set_grad_enabled(gradients):
            return apply(params, buffers, calls)[0]

    evaluation = fz.eval_step(evaluate)
    with torch.no_grad():
        expected = net(calls)

    def on_rank(group: fz.ProcessGroup) -> Any:
        state = fz.shard(step, level=3, group=group).init(params, buffers)
        return fz.shard(evaluation, level=3, group=group)(state, torch.ones(N))

    whole = evaluation(step.init(params, buffers), torch.ones(N))
    for got in (whole, *run_ranks(on_rank, 2)):
        assert_equal(Result(expected, {}, {}), Result(got, {}, {}))


@nested
@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_what_is_only_read_requires_no_grad(level: int) -> None:
    """A teacher's leaves, in a loss that takes it without `no_grad`; and a tensor beside them."""
    net = seeded({"it": encoder}, "trained", "evaluation")
    calls = attention_calls(encoder())
    apply, teacher, _ = fz.functionalize(net, units=nn.TransformerEncoderLayer)
    seen = []

    def loss(params: Any, teacher: Any, x: Tensor) -> Any:
        numbers, _ = apply(teacher, {}, calls)
        seen.append([x.requires_grad, *(leaf.requires_grad for leaf in teacher.values())])
        return params["w"] * x.sum(), fz.Aux(metrics=numbers)

    def program(value: Any, x: Tensor) -> Any:
        params, teacher = value
        (_, metrics), _ = fz.value_and_grad(loss)(params, teacher, x.clone().requires_grad_())
        return value, metrics

    step = fz.program_step(program, init=lambda params, teacher: (params, teacher))
    args = {"w": torch.ones((), requires_grad=True)}, teacher
    with torch.no_grad():
        expected = net(calls)

    def on_rank(group: fz.ProcessGroup) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        return sharded(sharded.init(*args), torch.ones(N))[1]

    for got in (step(step.init(*args), torch.ones(N))[1], *run_ranks(on_rank, 2)):
        assert_equal(Result(expected, {}, {}), Result(got, {}, {}))
    assert not any(map(any, seen))


class Asking(nn.Module):
    """Someone else's module that asks as torch's do; or that only runs operators."""

    def __init__(self, ask: Callable[[Any], Any]):
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        found = self.ask(self.layer.weight)
        result: Tensor = self.layer(x) if not found else -self.layer(x)
        return result


ASKS: dict[str, Callable[[Any], Any]] = {
    "torch function": lambda p: torch.overrides.has_torch_function((torch.ones(()), p)),
    "like a tensor": lambda p: not hasattr(p, "__torch_function__"),
}
ANSWERED: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda p: not torch.is_tensor(p),
    "leaf": lambda p: not p.is_leaf or p.grad_fn is not None,
    "trained": lambda p: not p.requires_grad,
    "device": lambda p: p.is_cuda or p.device.type != "cpu" or p.is_meta,
    "parameter": lambda p: isinstance(p, nn.Parameter),
    "storage": lambda p: p.data_ptr() == 0,
    "layout": lambda p: p.is_sparse or p.layout != torch.strided or not p.is_contiguous(),
    "operators": lambda p: (
        torch.stack([p, p]).isnan().any() or (torch.ones(4, 4) + p).isnan().all()
    ),
}


@pytest.mark.parametrize(
    ("ask", "level"),
    [
        pytest.param(ask, level, marks=marks)
        for level, *marks in ((3,), (0, THOROUGH), (1, THOROUGH), (2, THOROUGH))
        for ask in ASKS | ANSWERED
    ],
)
def test_what_a_param_is(ask: str, level: int) -> None:
    """Asked outside of its unit: answered as of a whole leaf, or refused."""
    question = (ASKS | ANSWERED)[ask]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(Asking(question)).double()
    apply, params, buffers = fz.functionalize(net, units=nn.Linear)
    batch = x(4)
    step = fz.train_step(
        lambda params, buffers, x: apply(params, buffers, x)[0].sum(), optim.sgd(0.1)
    )

    def on_rank(group: fz.ProcessGroup) -> Tensor:
        sharded = fz.shard(step, level=level, group=group)
        return sharded(sharded.init(params, buffers), batch)[1]["loss"]

    if ask in ASKS:
        with pytest.raises(StructureError, match=r"path 0\.layer\.weight.*functionalize\(units"):
            run_ranks(on_rank, 2)
    else:
        whole = step(step.init(params, buffers), batch)[1]["loss"]
        assert run_ranks(on_rank, 2) == [whole, whole]


@nested
@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_an_encoder_in_a_unit_that_is_not_called(level: int) -> None:
    """Its leaves are those of the unit around it."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.ModuleDict({"encoder": encoder().requires_grad_(False)})
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.outer["encoder"](x, src_key_padding_mask=PADDED)
            return self.factor * _projected(y)

    net, batch = Around().double().eval(), x(LENGTH, WIDTH)
    apply, params, _ = fz.functionalize(net, units="outer")
    step = fz.train_step(lambda params, buffers, x: apply(params, {}, x)[0], optim.sgd(0.1))

    def on_rank(group: fz.ProcessGroup) -> Tensor:
        sharded = fz.shard(step, level=level, group=group)
        return sharded(sharded.init(params, {}), batch)[1]["loss"]

    assert run_ranks(on_rank, 2) == [net(batch).detach()] * 2
