"""Every option alone, and in pairs: sharded = unsharded on threads and on processes, or refused
with the reason.

`OPTIONS` says what each one changes. Two that change one thing differently are two ways of one
option, and no pair. Params are kept in float64, so that roundings to half precisions are the same
on both sides: what isn't `reordered` says so, and why. `optim.compiled` has tests of its own: what
compiles it leaves threads behind.
"""

from __future__ import annotations

import importlib
import itertools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import util
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.compress import Blocks
from functorch_zero.errors import NonFiniteError
from functorch_zero.groups import (
    CheckedGroup,
    CountingGroup,
    HybridGroup,
    ProcessGroup,
    launch,
    run_ranks,
)
from functorch_zero.testing import Equality, assert_equal_values
from functorch_zero.testing.comparison import Comparison
from functorch_zero.testing.recording import RecordedStep, Recording
from functorch_zero.testing.runs import Start, run_in_parts, run_whole
from functorch_zero.testing.step import summed_whole
from tests.models import split
from tests.places import played_host
from tests.tiers import drawn, thinned, tiers

# Torch's compiler looks at it
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
E4M3, FP8_GRADS = torch.float8_e4m3fn, Blocks(torch.float8_e5m2, 8)
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS = 24
LEVELS = (0, 1, 2, 3)
# Ranks, and how many of them lie along the shard axis
WORLDS = (
    (1, None),
    (2, None),
    (3, None),
    (4, None),
)
MESHES = ((4, 2), (2, 2), (2, 1), (3, 1))


PLACE = fz.places.File(tempfile.gettempdir())  # its files have no names
PINNED = dict.fromkeys(("state", "saved"), played_host()[0])  # beside a GPU that is played
KINDS = ("state", "params", "gradients", "saved")


class Block(nn.Module):
    """A layer and a half, with what its options add: BatchNorm, dropout, a buffer that is read and
    changed."""

    def __init__(self, norm: type[nn.Module], dropout: float, gauge: bool, own_checkpoint: bool):
        super().__init__()
        self.norm, self.up, self.down = norm(5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.dropout, self.own_checkpoint = nn.Dropout(dropout), own_checkpoint
        if gauge:
            self.register_buffer("gauge", torch.ones(()))
        self.gauge: Tensor

    def reset_parameters(self) -> None:
        """For deferred values: the buffer's."""
        if hasattr(self, "gauge"):
            self.gauge.fill_(1)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(self.norm(x).to(x.dtype)))))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.own_checkpoint else self.inner(x)
        if hasattr(self, "gauge"):
            y = y * self.gauge.to(y.dtype)
            self.gauge = 0.9 * self.gauge + 0.1 * x.detach().square().mean().to(self.gauge.dtype)
        return x + y


class Net(nn.Module):
    """Blocks, one of them called twice; no dim divides."""

    def __init__(self, norm: type[nn.Module], **options: Any):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        self.blocks = nn.ModuleList(Block(norm, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Option:
    """What an option changes."""

    model: Changes = field(default_factory=dict)  # arguments of Net
    # (modules, field of Precision) -> dtype
    precision: Mapping[tuple[Any, str], Any] = field(default_factory=dict)
    functionalize: Changes = field(default_factory=dict)
    train_step: Changes = field(default_factory=dict)
    shard: Changes = field(default_factory=dict)
    loop: Changes = field(default_factory=dict)  # how the step is used
    wraps: tuple[Callable[[optim.Transform], optim.Transform], ...] = ()  # the optimizer
    # the loss of a batch isn't the mean of its parts' losses: the oracle averages over parts
    by_rank: bool = False
    neutral: bool = False  # without it the unsharded step has the same numbers
    bound: float = 0.0  # of grade `approximate`; 0: `reordered`
    rounds: float = (
        0.0  # what a difference in the last place may become; only beside an option with a bound
    )
    # gradients of few bits, some of which lie just between two numbers of a block of gradients;
    # times a rank's share they go either way
    few_bits: bool = False
    by_blocks: bool = False

    def beside(self, other: Option) -> Option | None:
        """Both; None where they are two ways of one option."""
        made: dict[str, Any] = {}
        for name, a, b in (
            (f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(Option)
        ):
            if isinstance(a, Mapping):
                if any(a[key] != b[key] for key in a.keys() & b.keys()):
                    return None
                made[name] = {**a, **b}
            else:
                made[name] = a + b if isinstance(a, tuple) else max(a, b)
        return Option(**made)

    @property
    def is_rounded(self) -> bool:
        """Whether sharded and unsharded round differently."""
        return self.bound > 0 or (self.few_bits and self.by_blocks)

    @property
    def grade(self) -> Equality:
        """Of the equality of sharded and unsharded."""
        if not self.is_rounded:
            return Equality("reordered")
        return Equality(
            "approximate",
            max(self.bound, self.rounds),
            "the option says which sums or values are rounded",
        )


def low(rule: Any = "", **dtypes: torch.dtype) -> dict[tuple[Any, str], torch.dtype]:
    """A policy as an option has it."""
    return {(rule, name): dtype for name, dtype in dtypes.items()}


# Torch's wants its input in the dtype of its running means
BATCH_NORM = Option(
    model={"norm": nn.BatchNorm1d}, precision=low(nn.BatchNorm1d, compute=F64), by_rank=True
)
MIXED = {"": 3, "blocks.0": 1, "blocks.*.up": 2, "head": 0}
FROZEN = ("blocks.0.up.weight", "head.bias")
# of a gradient of which most cancels, where a sum in another order lets a number round to its
# neighbour
HALF = 0.1

larger = lambda inner: optim.chain(inner, optim.scale(5.0))  # than the last places of bfloat16

OPTIONS: dict[str, Option] = {
    "nothing else": Option(),
    # precision
    "bfloat16": Option(precision=low(compute=BF16), by_rank=True, rounds=HALF, few_bits=True),
    "bfloat16, norms and head in float32": Option(
        precision=low(compute=BF16)
        | low("blocks.*.norm", compute=F32)
        | low("head", compute=F32, gather=BF16),
        by_rank=True,
        rounds=HALF,
        few_bits=True,
    ),
    "gather in bfloat16": Option(precision=low(gather=BF16)),
    "reduce in bfloat16": Option(
        precision=low(reduce=BF16), by_rank=True, bound=0.05
    ),  # a few roundings of 2^-9
    "reduce in float16": Option(precision=low(reduce=F16), by_rank=True, bound=0.01),
    "gather in int8": Option(precision=low(gather=Blocks(torch.int8, 8)), rounds=HALF),
    "reduce in int8": Option(
        precision=low(reduce=Blocks(torch.int8, 8)), by_rank=True, rounds=HALF, by_blocks=True
    ),
    "both in fp8": Option(
        precision=low(gather=Blocks(E4M3, 8), reduce=FP8_GRADS),
        by_rank=True,
        rounds=HALF,
        by_blocks=True,
    ),
    "stored in float32": Option(precision=low(storage=F32), bound=1e-5),
    "stored in bfloat16": Option(
        precision=low(storage=BF16), wraps=(larger,), by_rank=True, bound=0.05, rounds=HALF
    ),
    "buffers in float32": Option(
        model={"gauge": True}, precision=low(buffers=F32), by_rank=True, bound=1e-5
    ),  # their mean is rounded
    "output in float32": Option(
        precision=low(output=F32), by_rank=True, bound=1e-5
    ),  # its gradients' shares are, too
    "float16, loss scale": Option(
        precision=low(compute=F16),
        train_step={"loss_scale": fz.LossScale(2.0**24, 2.0**12, 2.0**-12, 2)},
        by_rank=True,
        bound=0.02,
        rounds=HALF,
        # overflows in the first and the fourth step; on three ranks a third, times the scale, is
        # rounded in backward
    ),
    # accumulation, and how batches are divided
    "accumulate": Option(train_step={"accumulate": 2}),
    "gradients add up in pieces": Option(
        train_step={"accumulate": 2}, shard={"reduce_gradients": "every_microbatch"}
    ),
    "gradients add up whole": Option(
        train_step={"accumulate": 2}, shard={"reduce_gradients": "once"}
    ),
    "gradients summed together": Option(shard={"reduce_bucket": 2000}),  # some of the units
    "uneven parts with weights": Option(loop={"parts": "uneven"}),
    "a rank has run out": Option(loop={"parts": "one empty"}),
    # recomputation
    "remat": Option(functionalize={"remat": True}, neutral=True),
    "remat of some": Option(functionalize={"remat": "blocks.0"}, neutral=True),
    "own checkpoint": Option(model={"own_checkpoint": True}, neutral=True),
    # parts and places
    "some trained": Option(train_step={"trainable": lambda path, leaf: path not in FROZEN}),
    "several levels": Option(shard={"level": MIXED}),
    "a mesh": Option(loop={"mesh": True}),
    "a mesh, state over both axes": Option(loop={"mesh": True}, shard={"state_axes": "both"}),
    "deferred values": Option(loop={"deferred": True}),
    # loops
    "running means evaluated": Option(
        wraps=(lambda inner: optim.params_ema(inner, 0.5),),
        loop={"evaluate": optim.ema_params},
        neutral=True,
    ),
    "evaluated": Option(loop={"evaluate": None}, neutral=True),
    "metrics": Option(
        train_step={"metrics": ["grad_norm", "update_norm", "param_norm"]}, neutral=True
    ),
    "its own metrics": Option(train_step={"metrics": ["learning_rate"]}, neutral=True),
    "clipped": Option(wraps=(lambda inner: optim.chain(optim.clip_by_global_norm(0.5), inner),)),
    "not finite: skip": Option(train_step={"nonfinite": "skip"}, loop={"spoiled": True}),
    "not finite: raise": Option(train_step={"nonfinite": "raise"}),
    "not finite: pass": Option(train_step={"nonfinite": "pass"}, neutral=True),
    "compiled units": Option(
        functionalize={"compile": True, "compile_options": {"backend": "aot_eager"}}, neutral=True
    ),
    "donate": Option(shard={"donate": True}),
    "keep the old state": Option(shard={"donate": False}),
    "placed": Option(shard={"place": dict.fromkeys(KINDS, PLACE)}),
    "placed beside a GPU": Option(shard={"place": PINNED}),
    "placed by unit": Option(
        shard={"place": {key: {"": PLACE, "blocks.*": None, "blocks.1": PLACE} for key in KINDS}}
    ),
    "stay gathered": Option(shard={"reshard_after_forward": False}),
    "checked group": Option(loop={"checked": True}),
    "BatchNorm, mean": BATCH_NORM.beside(Option(shard={"sync_buffers": "mean"})) or BATCH_NORM,
    "BatchNorm, rank 0's": BATCH_NORM.beside(Option(shard={"sync_buffers": "rank0"})) or BATCH_NORM,
    "BatchNorm, each its own": BATCH_NORM.beside(Option(shard={"sync_buffers": "local"}))
    or BATCH_NORM,
    "dropout": Option(model={"dropout": 0.4}, by_rank=True),
}
PAIRS = {
    (a, b): both
    for a, b in itertools.combinations(OPTIONS, 2)
    if (both := OPTIONS[a].beside(OPTIONS[b])) is not None
}
EXCLUDE = "loss_scale and nonfinite=.* exclude each other"
NO_PIECES = "keeps whole gradients until the update"
REFUSED: dict[frozenset[Any], str] = {  # of names of options and optimizers, and of levels
    frozenset({"float16, loss scale", "not finite: raise"}): EXCLUDE,
    frozenset({"float16, loss scale", "not finite: pass"}): EXCLUDE,
    frozenset({"gradients add up in pieces", 0}): NO_PIECES,
    frozenset({"gradients add up in pieces", 1}): NO_PIECES,
    frozenset({"gradients summed together", 3}): "level 3 works unit by unit",
    frozenset({"its own metrics", "adafactor"}): "this optimizer has no metric 'learning_rate'",
}

rate = optim.linear_schedule(0.2, 0.1, 5)
OPTIMIZERS: dict[str, Callable[[], optim.Transform]] = {
    "sgd": lambda: optim.sgd(rate, momentum=0.9),
    "adamw": lambda: optim.adamw(rate, eps=1e-3),
    "lamb": lambda: optim.lamb(rate, eps=1e-3),
    "adafactor": lambda: optim.adafactor(rate),
    "muon": lambda: optim.muon(rate),
}
LINEAR = ("sgd",)  # hands an error on as it is; the others divide by a gradient that may be small


class Case(NamedTuple):
    """A run, but for the ranks."""

    names: tuple[str, ...]
    level: int
    ranks: int
    shard_size: int | None
    optimizer: str

    @property
    def option(self) -> Option:
        """All options together."""
        made = Option()
        for name in self.names:
            joined = made.beside(OPTIONS[name])
            assert joined is not None, self.names
            made = joined
        return made

    @property
    def refusal(self) -> str | None:
        """What the error of an impossible combination says."""
        facts = {
            *self.names,
            self.optimizer,
            *([] if "level" in self.option.shard else [self.level]),
        }
        return "|".join(reason for pair, reason in REFUSED.items() if pair <= facts) or None


class Made(NamedTuple):
    """What a run is made of."""

    step: Any
    evaluate: Any
    start: Start
    values: Any


def build(case: Case) -> Made:
    """The unsharded steps, always the same."""
    o = case.option
    with torch.random.fork_rng(), torch.device("meta" if "deferred" in o.loop else "cpu"):
        torch.manual_seed(0)
        arguments = {
            "norm": nn.LayerNorm,
            "dropout": 0.0,
            "gauge": False,
            "own_checkpoint": False,
        } | o.model
        model = Net(**arguments).double()
    rules: dict[Any, dict[str, Any]] = {}
    for (rule, name), dtype in o.precision.items():
        rules.setdefault(rule, {})[name] = dtype
    precision = {rule: fz.Precision(**dtypes) for rule, dtypes in rules.items()} or None
    apply, params, buffers = fz.functionalize(
        model, units=Block, precision=precision, **o.functionalize
    )
    weighted = "parts" in o.loop

    def loss_fn(params: Any, buffers: Any, batch: Any, apply: Any = apply) -> Any:
        output, new = apply(params, buffers, batch["x"])
        loss, weight = (output - batch["y"]).square().mean(), len(batch["x"]) if weighted else None
        return loss, fz.Aux(
            buffers=new, metrics={"size": output.detach().double().abs().mean()}, weight=weight
        )

    def evaluated(params: Any, buffers: Any, batch: Any) -> Any:
        loss, aux = loss_fn(params, buffers, batch, apply.eval())
        return fz.Aux(metrics={"evaluated": loss}, weight=aux.weight)

    optimizer = OPTIMIZERS[case.optimizer]()
    for wrap in o.wraps:
        optimizer = wrap(optimizer)
    step = fz.train_step(loss_fn, optimizer, **o.train_step)
    evaluate = fz.eval_step(evaluated, params=o.loop["evaluate"]) if "evaluate" in o.loop else None
    return Made(
        step,
        evaluate,
        Start((params, buffers), 1),
        fz.deferred_init(model, 3) if "deferred" in o.loop else None,
    )


def placed(case: Case) -> dict[str, Any]:
    """What `shard` is given."""
    return {"level": case.level, **case.option.shard}


def sizes(how: str, ranks: int, k: int) -> list[int]:
    """Of each rank's part of batch k; enough for BatchNorm in two micro-batches."""
    if how == "one empty" and ranks > 1:
        filled = sizes("uneven", ranks - 1, k)
        return [*filled[: k % ranks], 0, *filled[k % ranks :]]
    uneven = how != "even" and ranks > 1
    return [ROWS // ranks - (uneven and r == 0) + (uneven and r == ranks - 1) for r in range(ranks)]


def batches(case: Case) -> list[list[Any]]:
    """Each batch in the ranks' parts."""
    g, loop = torch.Generator().manual_seed(2), case.option.loop
    made = []
    for k in range(5 if "loss_scale" in case.option.train_step else 3 if "spoiled" in loop else 2):
        drawn = torch.randn(ROWS, 5, generator=g, dtype=F64)
        if k == 1 and "spoiled" in loop:
            drawn[0, 0] = torch.inf
        made.append(
            split(
                {"x": drawn[:, :3], "y": drawn[:, 3:]},
                sizes(loop.get("parts", "even"), case.ranks, k),
            )
        )
    return made


def spoiled(rows: int) -> Any:
    x = torch.full((rows, 3), torch.nan, dtype=F64)
    return {"x": x, "y": torch.zeros(rows, 2, dtype=F64)}


def unsharded(case: Case) -> list[Recording]:
    """The oracle, on whole batches where that is the same; else by part."""
    step, evaluate, start, values = build(case)
    o, parts = case.option, batches(case)
    if values is not None:
        start = start._replace(args=tuple(map(values.fill, start.args)))
    if o.by_rank:
        rule, sums = o.shard.get("sync_buffers", "mean"), summed_whole(start, placed(case))
        runs = run_in_parts(step, start, parts, rule=rule, sums=sums)
    else:
        whole = [{n: torch.cat([p[n] for p in some]) for n in some[0]} for some in parts]
        runs = [run_whole(step, start, whole)]
    first = step.init(*start.args, seed=start.seed)
    if step.policy.nonfinite == "raise":
        with pytest.raises(NonFiniteError):
            step(as_state(first, runs[0].steps[-1]), spoiled(4))
    if evaluate is not None:
        for some, *copies in zip(parts, *(run.steps for run in runs), strict=True):
            mean = evaluated_by(evaluate, [as_state(first, done) for done in copies], some)
            for done in copies:
                done.others["metrics"] |= {"evaluated": mean}
    return runs


def as_state(first: Any, done: RecordedStep) -> Any:
    """The whole state after a step."""
    others = done.others
    step, _, finite = others["counters"]
    return first.replace(
        step=step,
        params=done.params,
        buffers=others["buffers"],
        opt_state=others["opt_state"],
        finite=finite,
    )


def evaluated_by(evaluate: Any, states: list[Any], parts: list[Any]) -> Any:
    """What all ranks' parts give by the oracle, averaged."""
    held = states * (len(parts) if len(states) == 1 else 1)
    found = [evaluate(state, part)["evaluated"] for state, part in zip(held, parts, strict=True)]
    weights = [len(part["x"]) for part in parts]
    return sum(x * w for x, w in zip(found, weights, strict=True)) / sum(weights)


def sharded(case: Case, group: Any, before: Sequence[Any] = ()) -> Recording:
    """One rank's run, the states gathered after each step. `before`: the whole states that the
    steps begin from; none: each begins from the one that the last step has returned."""
    step, evaluate, start, values = build(case)
    o = case.option
    group = CheckedGroup(group) if "checked" in o.loop else group
    group = group if case.shard_size is None else HybridGroup(group, shard_size=case.shard_size)
    nonfinite = step.policy.nonfinite
    step = fz.shard(step, group=group, **placed(case))
    state = step.init(*start.args, seed=start.seed, values=values)
    run = Recording(start.recorded(step.unshard(state)).params, part=group.rank)
    assert "first" in str(fz.describe(step, state))
    for k, parts in enumerate(batches(case)):
        if before:
            state = step.shard(before[k])
        state, metrics = step(state, parts[group.rank])
        if evaluate is not None:
            metrics |= fz.shard(evaluate, group=group, **placed(case))(state, parts[group.rank])
        whole = step.unshard(state)
        run.steps.append(start.recorded(whole, metrics))
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError):
            own = parts[group.rank]
            # As large as the others, so that nobody is warned; but not empty
            last = group.rank == group.size - 1
            step(state, spoiled(len(own["x"]) or 4) if last else own)
        assert_equal_values(whole.params, step.unshard(state).params, grade="bitwise")
    return run


def compare(
    case: Case, expected: list[Recording], runs: list[Recording], unused: tuple[str, ...] = ()
) -> None:
    """All ranks alike, and as the oracle; options that change no number change none. `unused`:
    leaves that may rest."""
    o = case.option
    at = {
        "options": " + ".join(case.names),
        "level": case.level,
        "ranks": case.ranks,
        "axis": case.shard_size,
    }
    assert_equal_values(expected[0].start, runs[0].start, grade="bitwise", what="first params")
    some = compared_steps(o, [*expected, *runs])
    comparison = Comparison(
        some[: len(expected)],
        some[len(expected) :],
        o.grade,
        unused=unused,
        local=o.shard.get("sync_buffers") == "local",
        at=at,
        sizes={},
        decays=None,
    )
    difference = comparison.difference()
    if difference is not None:
        raise difference


INT8, FP8 = "params in int8", "gradients in fp8"


def growth(o: Option) -> str | None:
    """By what the round-off of one step makes more of it in the next; None: it doesn't. Only where
    params lie in bfloat16, whose sums in another order differ in their last places.

    A param that is a place apart after a step may be the next number of int8, a 127th of the
    largest in its block: gradients of which most cancels differ by a tenth then. And a gradient
    that lies between two numbers of fp8 goes to the other one, a quarter away, and with it a sixth
    of the numbers of the next step. Grade and bound are of one step.
    """
    policy = {name: dtype for (rule, name), dtype in o.precision.items() if not rule}
    if policy.get("storage") != BF16:
        return None
    if policy.get("reduce") == FP8_GRADS:
        return FP8
    return INT8 if isinstance(policy.get("gather"), Blocks) else None


def compare_each_step(case: Case, expected: list[Recording]) -> None:
    """Each step from the oracle's state before it, so that no round-off of earlier ones counts."""
    step, _, start, values = build(case)
    if values is not None:
        start = start._replace(args=tuple(map(values.fill, start.args)))
    first = step.init(*start.args, seed=start.seed)

    def run(group: Any) -> Recording:
        own = expected[group.rank % len(expected)]  # with buffers of its own, where it has these
        return sharded(case, group, [first, *(as_state(first, done) for done in own.steps)])

    runs = run_ranks(run, case.ranks)
    for k in range(len(expected[0].steps)):
        params = expected[0].params(k - 1)
        alone = [
            [replace(one, start=params, steps=[one.steps[k]]) for one in some]
            for some in (expected, runs)
        ]
        # In a step that is skipped all leaves rest
        compare(case, *alone, unused=("*",))


def compared_steps(o: Option, runs: list[Recording]) -> list[Recording]:
    """The runs as far as they are compared: to the first step that moves params, where round-off
    grows from step to step."""
    if growth(o) is None:
        return runs
    first = fz.named_leaves(runs[0].start)
    after = [fz.named_leaves(done.params) for done in runs[0].steps]
    moves = [any(not torch.equal(x, first[path]) for path, x in now.items()) for now in after]
    end = moves.index(True) + 1 if any(moves) else len(moves)
    return [replace(run, steps=run.steps[:end]) for run in runs]


def check(case: Case) -> None:
    """On threads."""
    if case.refusal is not None:
        with pytest.raises(ValueError, match=case.refusal):
            made = build(case)
            mesh = (
                HybridGroup(CountingGroup(2), shard_size=1)
                if "mesh" in case.option.loop
                else CountingGroup(2)
            )
            fz.shard(made.step, group=mesh, **placed(case)).init(
                *made.start.args, values=made.values
            )
        return
    if "compile" in case.option.functionalize:
        torch._dynamo.reset()
        if util.find_spec("tqdm"):
            importlib.import_module(
                "tqdm"
            ).tqdm.monitor_interval = 0  # torch's compiler starts a thread
    expected = unsharded(case)
    compare(case, expected, run_ranks(lambda group: sharded(case, group), case.ranks))
    if growth(case.option) == INT8:
        compare_each_step(case, expected)
    plain = tuple(name for name in case.names if not OPTIONS[name].neutral)
    if plain != case.names:
        runs = compared_steps(case.option, [unsharded(case._replace(names=plain))[0], expected[0]])
        for k in range(-1, len(runs[0].steps)):
            want, have = (run.params(k) for run in runs)
            assert_equal_values(
                want,
                have,
                grade=case.option.grade,
                what="params without what changes no number",
            )


@st.composite
def cases(draw: Any) -> Case:
    """Two options, the first perhaps none, and all that they are run with."""
    return drawn_case(
        draw(st.sampled_from([*PAIRS])), lambda choices: draw(st.sampled_from(choices))
    )


def drawn_case(names: tuple[str, ...], choose: Any) -> Case:
    """Level, ranks and optimizer for these options."""
    o = Case(names, 0, 1, None, "sgd").option
    ranks, axis = choose(MESHES if "mesh" in o.loop else WORLDS)
    return Case(
        names, choose(LEVELS), ranks, axis, choose(LINEAR if o.is_rounded else [*OPTIMIZERS])
    )


COMPILED = "compiled units"  # the slow one


QUICK = [name for name in OPTIONS if name != COMPILED]


@pytest.mark.parametrize("name", thinned([*QUICK, COMPILED], len(OPTIONS)))
def test_each_alone(name: str) -> None:
    check(drawn_case((name,), random.Random(name).choice))


@drawn(cases())
def test_pairs(case: Case) -> None:
    check(case)


# Kinds lie in memory, elsewhere, or by unit in either
BESIDE_PLACES = [pair for pair in PAIRS if {"placed", "placed by unit"} & {*pair}]


@pytest.mark.parametrize("names", tiers([], BESIDE_PLACES[::9], BESIDE_PLACES), ids=" + ".join)
def test_places_beside_each_option(names: tuple[str, str]) -> None:
    check(drawn_case(names, random.Random(str(names)).choice))


@pytest.mark.parametrize("seed", tiers([0], [2], [1, *range(3, 44)]))
def test_as_many_as_go_together(seed: int) -> None:
    """The first without the compiler, beside which all else is quick."""
    rng, chosen = random.Random(seed), Case((), 2, 1, None, "sgd")
    names = [name for name in OPTIONS if seed or name != COMPILED]
    for name in rng.sample(names, len(names)):
        more = chosen._replace(names=tuple(sorted((*chosen.names, name), key=[*OPTIONS].index)))
        if chosen.option.beside(OPTIONS[name]) is not None and more.refusal is None:
            chosen = more
    check(drawn_case(chosen.names, rng.choice))


@pytest.mark.parametrize("pairs", tiers([[*PAIRS][::96]], [[*PAIRS][::4]], [[*PAIRS]]), ids=len)
def test_nothing_else_is_refused(pairs: list[tuple[str, str]]) -> None:
    """At construction, at any level."""
    group = CountingGroup(2)
    for names in pairs:
        possible = [
            case for level in LEVELS if (case := Case(names, level, 1, None, "sgd")).refusal is None
        ]
        step = build(possible[0]).step if possible else None
        for case in possible:
            mesh = HybridGroup(group, shard_size=1) if "mesh" in case.option.loop else group
            fz.shard(step, group=mesh, **placed(case))


def test_what_is_refused() -> None:
    for pair in REFUSED:
        names = tuple(name for name in OPTIONS if name in pair)
        (level,) = pair & {*LEVELS} or {2}
        (optimizer,) = pair & {*OPTIMIZERS} or {"sgd"}
        check(Case(names, level, 2, None, optimizer))


@pytest.mark.parametrize(
    ("ranks", "num_pairs"), tiers(thorough=[(3, 8), (2, 8)], full=[(3, 20), (2, 20)], rows=True)
)
def test_on_processes(ranks: int, num_pairs: int) -> None:
    """Pairs that are drawn here, all in one launch."""
    rng, some = random.Random(ranks), []
    while len(some) < num_pairs:
        case = drawn_case(rng.choice([*PAIRS]), rng.choice)
        if case.ranks == ranks and case.refusal is None:
            some.append(case)
    runs = launch(
        lambda: [sharded(case, ProcessGroup()) for case in some],
        ranks,
        start_method="fork",
        timeout=100,
    )
    for case, *found in zip(some, *runs, strict=True):
        compare(case, unsharded(case), found)
