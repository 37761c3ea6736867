"""A loop on ranks is proved by one process: planted faults are found with their cause, and right
loops pass. `tests/testing/loops.py` has both."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from functorch_zero.testing import ProvesNothing, Recorder, assert_parallel_equals_reference
from tests.testing import loops
from tests.testing.loops import Loop
from tests.tiers import thinned

RESUMED = {"resume_at": 2}
BFLOAT16 = {"rounding": torch.bfloat16}

# The fault, what its error must say, and options
FAULTS: list[tuple[type[Loop], str, dict[str, Any]]] = [
    (loops.Summed, "3 times the reference's, 3 being the number of ranks", {}),
    (loops.Divided, "1/3 of the reference's, 3 being the number of ranks", {}),
    (loops.DividedTwice, "1/3² of the reference's", {}),
    (loops.FirstRankOnly, "what part 0 of the rows gives alone", {}),
    (loops.Unreduced, r"in 1 of 7 leaves, on all ranks.*each rank's own.*not reduced", {}),
    (loops.MissingOnARank, r"leaf head\.weight.*on rank 1 only.*missing on rank 1", {}),
    (
        loops.NotDivided,
        "4 times the reference's, 4 being the number of micro-batches",
        {"sizes": {"micro-batches": 4}},
    ),
    (loops.Unweighted, "plain mean over the ranks' parts.*weights.*left out", {}),
    (loops.Stale, "stale by a step", {}),
    (loops.NotZeroed, "gradients differ at step 1.*nothing set them to zero", {}),
    (loops.TiedTwice, r"leaf middle\.weight.*in 1 of 7.*tied leaf", {}),
    (
        loops.Experts,
        r"leaf up\.weight.*8 times the reference's, 8 being the number of experts",
        {"sizes": {"experts": 8}},
    ),
    (loops.PiecesSwapped, "the reference's in other places: likely pieces in another order", {}),
    (loops.OwnLoss, "the loss differs.*what part 0 of the rows gives alone", {}),
    (loops.SquaresSummed, "the norm differs.*√3 times the reference's", {}),
    (loops.PieceNorm, "the norm differs.*norms of the ranks' pieces", {}),
    (loops.NormWithoutHead, r"a norm that leaves out head\.weight\.", {}),
    (loops.NormOfOwn, "the mean of the norms of the ranks' own gradients", {}),
    (loops.AdamAhead, "step is 2, and 1.*bias correction is a step ahead", {}),
    (loops.WeightDecay, r"weight_decay is 0\.2, and 0\.1.*times the params", {}),
    (loops.DecayedTwice, r"the updates differ.*-0\.000999 times the params.*weight decay", {}),
    (loops.LearningRate, r"lr is 0\.3, and 0\.1 in the reference", {}),
    (loops.LeftOut, r"no param group with up\.bias.*missing on all ranks", {}),
    (loops.FrozenMoves, r"leaf frozen\[0\]: expected 0\.0.*in 1 of 9 leaves", {}),
    (loops.OnePiece, r"of middle\.weight all but piece 0 of 3 \(ranks\).*missing on all", {}),
    (loops.ReducedAfterwards, "the gradients differ.*not reduced", {}),
    (loops.Replicas, "the params differ at the start.*on rank 1, 2 only.*seed all alike", {}),
    (loops.Drifting, r"replicas of a leaf differ at step 0.*up\.weight, on rank 1", {}),
    (loops.NearlyScaled, r"at step 3: leaf up\.weight.*is 1\+\S+ times the reference's", {}),
    (loops.NearlyRight, "the gradients differ at step 0.*No mistake that is known", {}),
    (loops.OwnBuffers, "the buffers differ.*each rank's own.*not reduced", {}),
    (loops.Dropout, "the reference and rank 0 drew random numbers: dropout", {}),
    (loops.LosesMomentum, "resumed at step 2.*this step's gradient alone.*state is lost", RESUMED),
    (loops.LosesAdam, "step is 1, and 3.*the sign of this step's gradient alone", RESUMED),
    (loops.LosesTheStep, "step is 1, and 3.*correction is that of the first step", RESUMED),
    (loops.LosesTheSchedule, r"lr is 0\.01, and 0\.0049 in the reference", RESUMED),
    (loops.LosesParams, "at the start, in the run that was resumed.*nothing was loaded", RESUMED),
    (loops.LosesBuffers, r"the buffers differ.*-0\.9 times that of the step before", RESUMED),
]


def check(fault: Any, ranks: int = 3, **options: Any) -> None:
    """By threads, each of which has a loop of its own."""
    assert_parallel_equals_reference(
        fault(), lambda record: fault()(record), ranks, start_method="threads", **options
    )


@pytest.mark.parametrize(
    ("fault", "story", "options"),
    thinned(FAULTS, 16, rows=True),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_found_with_its_cause(
    fault: type[Loop], story: str, options: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError) as caught:
        check(fault, **options)
    text = str(caught.value)
    assert re.search(story, text, re.DOTALL), text
    # Some of the params are excused from nothing
    assert not isinstance(caught.value, ProvesNothing)


def test_most_faults_have_a_cause() -> None:
    assert len(FAULTS) >= 20


OF_LAST_PLACES = [loops.Drifting, loops.FrozenMoves, loops.NearlyRight]  # in float64
IN_HALF = [loops.Summed, loops.NotDivided, loops.MissingOnARank, loops.SquaresSummed]


@pytest.mark.parametrize(
    ("precision", "fault", "options", "story"),
    thinned(
        [
            *((loops.Float32, f, o, s) for f, s, o in FAULTS if f not in OF_LAST_PLACES),
            *((loops.Autocast, f, o | BFLOAT16, s) for f, s, o in FAULTS if f in IN_HALF),
        ],
        18,
        rows=True,
    ),
)
def test_a_fault_is_found_as_is(
    precision: type[Loop], fault: type[Loop], options: dict[str, Any], story: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        check(type("Rounded", (fault, precision), {}), **options)
    assert re.search(story, str(caught.value), re.DOTALL), caught.value


# Right loops


def loop(**attributes: Any) -> type[Loop]:
    return type("Right", (Loop,), attributes)


def optimizer_of(name: str, **settings: Any) -> type[Loop]:
    def make(self: Loop) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(self.net.parameters(), **settings)
        return made

    return loop(make_optimizer=make)


RIGHT: dict[str, tuple[type[Loop], dict[str, Any]]] = {
    "adamw": (Loop, {}),
    "momentum": (loops.Momentum, {}),
    "sgd": (optimizer_of("SGD", lr=0.5), {}),
    "adam": (optimizer_of("Adam", lr=1e-2), {}),
    "amsgrad": (optimizer_of("Adam", lr=1e-2, amsgrad=True), {}),
    "nadam": (optimizer_of("NAdam", lr=1e-2), {}),
    "radam": (optimizer_of("RAdam", lr=1e-2), {}),
    "rmsprop": (optimizer_of("RMSprop", lr=1e-3), {}),
    "adagrad": (optimizer_of("Adagrad", lr=1e-2), {}),
    "adamax": (optimizer_of("Adamax", lr=1e-2), {}),
    "adadelta": (optimizer_of("Adadelta", lr=1.0), {}),
    "asgd": (optimizer_of("ASGD", lr=1e-1), {}),
    "float32": (loops.Float32, {}),
    "bfloat16": (loops.BFloat16, {}),
    "autocast": (loops.Autocast, BFLOAT16),
    "micro-batches": (loop(micro_batches=4), {}),
    "uneven rows": (loop(rows=13), {}),
    "no clipping": (loop(max_norm=1e9), {}),
    "two ranks": (Loop, {"ranks": 2}),
    "one rank": (Loop, {"ranks": 1}),
    "four ranks": (Loop, {"ranks": 4}),
    "reordered": (Loop, {"grade": "reordered"}),
    "odd leaves": (loops.Odd, {"resume_at": 3}),
    "resumed": (Loop, RESUMED),
    "resumed momentum": (loops.Momentum, {"resume_at": 3}),
}


@pytest.mark.parametrize("name", thinned(RIGHT))
def test_a_right_loop_passes(name: str) -> None:
    right, options = RIGHT[name]
    check(right, **options)


# What is refused


class Quiet(Loop):
    """Tells no gradients on ranks."""

    def __call__(self, record: Recorder) -> None:
        if record.group.size > 1:
            record.gradients = lambda gradients: None  # type: ignore[method-assign]
        super().__call__(record)


class Renamed(Loop):
    def model(self) -> Any:
        net = super().model()
        if self.group.size > 1:
            net.tail, net.forward = net.head, net.forward
            del net._modules["head"]
            net.head = lambda x: net.tail(x)
        return net


class OneStepLess(Loop):
    @property
    def steps(self) -> int:  # type: ignore[override]
        return 4 if self.group.size == 1 else 3


class Restless(Loop):
    """Draws what no seed gives."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss(x, y) * (1 + random.random())


class StandsStill(Loop):
    def step(self) -> None:
        self.net.head.weight.grad = None
        super().step()


@pytest.mark.parametrize(
    ("wrong", "error", "story", "options"),
    [
        (Quiet, AssertionError, r"other leaves \(gradients\).*expected.*got no such leaf", {}),
        (Renamed, AssertionError, r"path head\.weight.*no such leaf.*names=", {}),
        (OneStepLess, AssertionError, "expected 4, got 3, on rank 0", {}),
        (Restless, AssertionError, "gives other numbers when it runs again", {}),
        (StandsStill, ProvesNothing, r"expected update is zero.*path head\.weight", {}),
        (loops.Explodes, ProvesNothing, "the expected update is not finite", {}),
        (Loop, ValueError, "expected resume_at from 1 to 3, got 4", {"resume_at": 4}),
    ],
)
def test_what_would_prove_nothing_is_refused(
    wrong: type[Loop], error: type[Exception], story: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=re.compile(story, re.DOTALL)):
        check(wrong, **options)


def test_names_are_mapped() -> None:
    check(Renamed, names=lambda name: name.replace("tail", "head"))
    check(Renamed, names={f"tail.{x}": f"head.{x}" for x in ("weight", "bias")})


class Shifted(Loop):
    """A param whose true gradient is zero, as that of the bias of attention's keys."""

    def model(self) -> Any:
        net = super().model()
        net.shift = torch.nn.Parameter(torch.zeros(1, dtype=self.dtype))
        return net

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.net.up(x) + self.net.shift
        return super().loss(x, y) - logits.log_softmax(1)[:, 0].mean()


def test_a_leaf_of_round_off_is_refused_unless_it_is_named() -> None:
    with pytest.raises(ProvesNothing, match=r"it can't be told.*path shift"):
        check(Shifted)
    check(Shifted, unused=["shift"])
