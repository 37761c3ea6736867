"""`assert_parallel_equals_reference`: anybody's training loop on ranks, compared with one process.

Note [measured]: sums in another order differ by roundings, and a model may amplify these. How far
is measured on the reference: it runs again, from params that are off by one rounding. Ranks may be
off by ten times what that changes: in each element, and by what it changes nine tenths of a leaf's
elements at most, since a few runs miss some elements. In half precision that may be as much as the
values themselves. So how many times the reference's a leaf is, as a whole, is measured and compared
in the same way: there roundings cancel out, and a factor doesn't.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import explain
from ..groups import ProcessGroup, launch, run_ranks
from ..groups.protocol import Group
from .causes import Adam, Evidence, Wrong, sizes_of, where, why
from .comparison import ROUND_OFF
from .equality import (
    REORDERED,
    Equality,
    Grade,
    ProvesNothing,
    apart,
    as_equality,
    check_moves,
    compare_within,
    first_of,
    is_rounded,
    largest,
    last_places,
    same_bits,
    wide,
    wide_values,
)
from .recorder import TOLD, Names, Recorder, Share, Task
from .recording import Leaves, RecordedStep, Recording

Loop: TypeAlias = Callable[[Recorder], object]

_SINGULAR = ("loss", "norm", "optimizer's state")
_MEASURING_RUNS = 5
_OFTEN = 0.9  # of a leaf's elements, see Note [measured]
_TELLING = 0.25  # of itself, by which round-off may change a leaf as a whole
_ROUNDINGS = 8  # of the largest gradient; a leaf's that are no larger may be nothing else
_HALF = 2  # roundings that a value of half precision may always be off by


def assert_parallel_equals_reference(
    reference: Loop,
    candidate: Loop,
    ranks: int = 2,
    *,
    grade: Grade | Equality | Literal["measured"] = "measured",
    rounding: torch.dtype | None = None,
    resume_at: int | None = None,
    names: Names | None = None,
    sizes: Mapping[str, int] | None = None,
    unused: Iterable[str] = (),
    timeout: float = 120.0,
    start_method: Literal["spawn", "fork", "threads"] = "spawn",
) -> None:
    """Prove a training loop on ranks, in whatever engine, by the same loop in one process.

    Both are called with a `Recorder`, and tell it what each step computed. In this order, step by
    step, are compared: the loss (the mean of the ranks' own), the gradients, the norm as logged,
    the updates of the params, the optimizer's state, the buffers, and the params among ranks, bit
    by bit. The first difference is raised, with the mistake that explains it, where one does.

    Args:
        reference: the loop in one process, this one. It must give the same numbers when it is
            called again.
        candidate: the loop on ranks, with torch.distributed initialised over gloo, or NCCL where
            there is a GPU for each rank.
        ranks: their number. With 3, more mistakes can be told from each other than with 2 or 4.
        grade: how equal they must be. "measured": up to round-off as it carries in the reference,
            and no less than "reordered" allows; float16 and bfloat16, too. "reordered" takes
            float64 or float32; see `Equality`.
        rounding: the coarsest dtype that the loops compute in, where it is not the params':
            `torch.bfloat16` under autocast. Its roundings are measured then.
        resume_at: also run the candidate up to this step, save it to `record.save_to`, and let
            new ranks go on from `record.load_from`.
        names: the reference's names for the candidate's, as a function or a dict. Those of DDP,
            FSDP, torch.compile and checkpoint wrappers are taken off by themselves.
        sizes: other numbers by which a mistake may multiply, by what they count:
            `{"micro-batches": 4, "experts": 8}`. The axes of DTensors' meshes are found.
        unused: paths, or patterns of paths, of trained leaves that the loss does not use, or whose
            gradient is round-off. Of these only the replicas are compared.
        timeout: seconds for the ranks of one run to end.
        start_method: of `launch`; "spawn" needs functions of a module that can be imported. With
            "threads" ranks are threads, for loops that communicate by `record.group` alone.

    Raises:
        AssertionError: naming the first leaf, step and rank that differ, by how much, and why.
        ProvesNothing: an AssertionError, too: a trained leaf doesn't move, or round-off may change
            a leaf that differs altogether.
        TimeoutError: ranks still ran after `timeout` seconds.
        Exception: the reference's or the first failing rank's, with that rank's traceback.
    """
    oracle = _Reference(reference, rounding, tuple(unused))
    run = partial(_run, candidate, ranks, timeout, start_method)
    equality = None if grade == "measured" else as_equality(grade)
    proof = partial(_Proof, oracle, equality=equality, given_sizes=dict(sizes or {}))
    oracle.check_moves()
    proof(run(Task(names=names))).run()
    if resume_at is None:
        return
    if not 0 < resume_at < oracle.num_steps:
        raise ValueError(
            explain(
                "no step is left on one side of the interruption",
                expected=f"resume_at from 1 to {oracle.num_steps - 1}",
                got=resume_at,
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        task = Task(names=names, folder=Path(folder))
        run(replace(task, stop=resume_at))
        proof(run(replace(task, first=resume_at))).run()


def _run(
    candidate: Loop, ranks: int, timeout: float, start_method: str, task: Task
) -> list[Recording]:
    """The candidate's recordings, by rank."""
    on_a_rank = partial(_record, candidate, task)
    if start_method == "threads":
        return run_ranks(on_a_rank, ranks, timeout=timeout)
    found = launch(on_a_rank, ranks, timeout=timeout, start_method=start_method)  # type: ignore[arg-type]
    if len(found) != ranks:
        raise RuntimeError(
            explain(
                "a launcher has started this process, so that its ranks can't be compared here",
                expected=f"{ranks} recordings",
                got=len(found),
                remedy="start the proof with python, without torchrun or srun",
            )
        )
    return found


def _record(candidate: Loop, task: Task, group: Group | None = None) -> Recording:
    """Run the candidate on this rank."""
    recorder = Recorder(group or ProcessGroup(), task)
    candidate(recorder)
    return recorder.recording


@dataclass(frozen=True)
class _Reference:
    """The loop in one process, and how it runs."""

    loop: Loop
    rounding: torch.dtype | None  # whose roundings are measured; None: the params'
    unused: tuple[str, ...]  # patterns of leaves that aren't compared

    def run(self, jitter: int | None = None, share: Share | None = None) -> Recording:
        recorder = Recorder(
            task=Task(is_reference=True, share=share, jitter=jitter, rounding=self.rounding)
        )
        with torch.random.fork_rng(devices=[]):  # the caller's stream goes on as it was
            self.loop(recorder)
        return recorder.recording

    @cached_property
    def recording(self) -> Recording:
        return self.run()

    @cached_property
    def measuring(self) -> list[Recording]:
        """Runs that begin with params that are off by one rounding."""
        return [self.run(jitter=seed) for seed in range(_MEASURING_RUNS)]

    @property
    def num_steps(self) -> int:
        return len(self.recording.steps)

    def is_unused(self, name: str) -> bool:
        """Whether the values of a leaf, or what an optimizer keeps for it, may be round-off."""
        return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in self.unused)

    def check_moves(self) -> None:
        """Refuse a run that would prove nothing."""
        run = self.recording
        if not run.steps:
            raise ProvesNothing("the reference has recorded no step. Remedy: call record.step")
        for name, values in run.histories():
            if name in run.trained and not self.is_unused(name):
                check_moves(name, values, Equality("reordered"))

    def check_repeats(self) -> None:
        """Refuse a loop that draws other numbers each time: neither round-off nor causes can be
        told then."""
        if not self.run().repeats(self.recording):
            raise AssertionError(
                "The reference gives other numbers when it runs again. Remedy: seed all that it "
                "draws, and make model and optimizer anew in each call."
            )

    def spread(self, k: int, kind: str) -> Leaves:
        """How far round-off may carry, by leaf, elementwise; see Note [measured]."""
        found = {}
        for name, leaf in self.recording.values(k, kind).items():
            if leaf.numel():
                others = [run.values(k, kind)[name] for run in self.measuring]
                most = torch.stack([(wide(x) - wide(leaf)).abs() for x in others]).amax(0)
                often = most.flatten().kthvalue(math.ceil(_OFTEN * most.numel())).values
                found[name] = ROUND_OFF * torch.maximum(most, often)
        return found


@dataclass(frozen=True)
class _Proof:
    """One run of the candidate beside the reference's."""

    oracle: _Reference
    got: Sequence[Recording]  # by rank
    equality: Equality | None  # None: round-off is measured
    given_sizes: Mapping[str, int]

    @property
    def first(self) -> int:
        """The number of this run's first step: 0, or where it was resumed."""
        return self.got[0].first

    def run(self) -> None:
        """Raise at the first difference."""
        expected = self.oracle.num_steps - self.first
        for rank, run in enumerate(self.got):
            if len(run.steps) != expected:
                raise AssertionError(
                    explain(
                        "the candidate and the reference recorded other numbers of steps",
                        expected=expected,
                        got=len(run.steps),
                        rank=rank,
                        remedy="call record.step once for each batch of record.batches",
                    )
                )
        self._compare(self.first - 1, "start")
        for k in range(self.first, self.oracle.num_steps):
            for kind in TOLD:
                self._compare(k, kind)
            self._compare_replicas(k)

    def _compare(self, k: int, kind: str) -> None:
        """Raise where some rank's values differ from the reference's."""
        expected = self.oracle.recording.values(k, kind)
        got = [run.values(k, kind, self.oracle.recording.start) for run in self.got]
        if kind == "loss" and all(got):  # of the ranks' own the mean is compared
            got = [{kind: torch.stack([wide(values[kind]) for values in got]).mean(0)}]
        _check_names(kind, expected, got)
        wrong = self._wrong(k, kind, expected, got, {})
        if wrong:
            self.oracle.check_repeats()
        if wrong and self.equality is None:
            spread = self.oracle.spread(k, kind)
            beyond = self._wrong(k, kind, expected, got, spread)
            wrong = beyond or self._wrong_as_a_whole(k, kind, wrong, spread)
        if wrong:
            self._check_is_more_than_round_off(k, kind, wrong[0].leaf, expected)
            raise AssertionError(self._story(k, kind, wrong, got))

    def _wrong(
        self, k: int, kind: str, expected: Leaves, got: list[Leaves], spread: Leaves
    ) -> list[Wrong]:
        found = []
        for rank, values in enumerate(got):
            for name, leaf in expected.items():
                if name not in values or not leaf.numel() or self.oracle.is_unused(name):
                    continue
                allowed = self._allowed(k, kind, name, leaf) + spread.get(name, 0.0)
                difference = compare_within(name, leaf, values[name], allowed, rank)
                if difference is not None:
                    found.append(difference)
        return found

    def _allowed(self, k: int, kind: str, name: str, leaf: Tensor) -> Tensor:
        """How far the elements of a leaf may be apart without measuring."""
        allowed = torch.zeros(leaf.shape, dtype=torch.float64, device="cpu")
        run, rounding = self.oracle.recording, self.oracle.rounding
        dtypes = {leaf.dtype, rounding or leaf.dtype, *(x.dtype for x in run.start.values())}
        tolerance = _floor(dtypes) if self.equality is None else self.equality.tolerance(dtypes)
        if not tolerance or not is_rounded(leaf):
            return allowed
        allowed += tolerance * largest(leaf)
        if kind in ("updates", "start"):
            before = run.params(k - 1) if kind == "updates" else run.start
            allowed += last_places(before[name], run.params(k)[name])
        return allowed

    def _wrong_as_a_whole(
        self, k: int, kind: str, found: list[Wrong], spread: Leaves
    ) -> list[Wrong]:
        """Of leaves whose elements are near enough, those that are another multiple of the
        reference's; see Note [measured]."""
        off = []
        for row in found:
            name = row.leaf
            others = [wide(run.values(k, kind)[name]) for run in self.oracle.measuring]
            apart = max(abs(_ratio(row.expected, other) - 1) for other in others)
            allowed = ROUND_OFF * apart + _floor([torch.float32])
            if not allowed <= _TELLING:  # a NaN, too
                story = "params that are off by one rounding change this leaf as a whole by"
                raise self._cannot_tell(k, kind, name, f"{story} {apart:.1%}")
            if abs(_ratio(row.expected, row.got) - 1) > allowed:
                # As near to what explains it as round-off lets it be
                off.append(row._replace(allowed=row.allowed + spread[name]))
        return off

    def _check_is_more_than_round_off(self, k: int, kind: str, name: str, expected: Leaves) -> None:
        """Refuse a gradient that is about zero beside the others: a few runs may round it alike."""
        size, dtype = largest(expected[name]), expected[name].dtype
        most = max(largest(leaf) for leaf in expected.values() if leaf.numel())
        if kind == "gradients" and 0 < size <= _ROUNDINGS * torch.finfo(dtype).eps * most:
            story = f"this leaf's are at most {size:.3g}, and others' {most:.3g}"
            raise self._cannot_tell(k, kind, name, story)

    def _cannot_tell(self, k: int, kind: str, name: str, story: str) -> ProvesNothing:
        return ProvesNothing(
            explain(
                f"it can't be told whether {_differ(kind)}{self._at(k)}: {story}",
                path=name,
                remedy="prove it in float64, or name it in `unused` where its true gradient is "
                "zero",
            )
        )

    def _compare_replicas(self, k: int) -> None:
        """Raise unless the params that several ranks hold are the same, to the bit."""
        first: Leaves = {}
        for rank, run in enumerate(self.got):
            for name, leaf in run.params(k).items():
                if not bool(same_bits(first.setdefault(name, leaf), leaf).all()):
                    by = apart(first[name], leaf)
                    raise AssertionError(
                        explain(
                            f"the replicas of a leaf differ{self._at(k)}: by {by:.3g}, no "
                            "more than round-off, but they will drift apart",
                            path=name,
                            rank=rank,
                            remedy="let all ranks start from the same params, and update them by "
                            "the same sums, in one order",
                        )
                    )

    # The story of a difference

    def _at(self, k: int) -> str:
        resumed = f", in the run that was resumed at step {self.first}" if self.first else ""
        return f" at step {k}{resumed}" if k >= self.first else f" at the start{resumed}"

    def _story(self, k: int, kind: str, found: list[Wrong], got: list[Leaves]) -> str:
        """Which values differ, where, and why."""
        evidence = self._evidence(k, kind, found, got)
        lines = [f"{_differ(kind)}{self._at(k)}: {first_of(found)}."]
        if place := where(evidence):
            lines.append(f"Where: {place}.")
        lines += self._facts(k, found[0])
        cause = why(evidence)
        if kind == "start" and self.first and "missing" in cause:
            cause = "These are the params of the start: nothing was loaded."
        return "\n".join([*lines, cause or "No mistake that is known here explains it."])

    def _evidence(self, k: int, kind: str, wrong: list[Wrong], got: list[Leaves]) -> Evidence:
        return Evidence.of_step(
            k,
            kind,
            self.oracle.recording,
            self.got,
            wrong=wrong,
            sizes=self._sizes,
            num_leaves=len({name for values in got for name in values}),
            ranks=[wide_values(values) for values in got],
            shares=partial(self._of_shares, k, kind),
            adam=self._adam(k, wrong[0].leaf) if kind == "updates" else None,
        )

    def _adam(self, k: int, name: str) -> Adam | None:
        """Adam's settings, where torch's optimizer has them for a param."""
        settings = self.oracle.recording.at(k).settings.get(name, {})
        known = [settings[key] for key in ("betas.0", "betas.1", "step") if key in settings]
        return Adam(*known) if len(known) == 3 else None

    def _of_shares(self, k: int, kind: str) -> list[Leaves]:
        """The reference's values from the rows of one part alone, by part; none where it can't be
        run so."""
        numbers = {run.num_parts for run in self.got}
        if kind == "start" or len(numbers) > 1 or 0 in (*numbers, self.oracle.recording.num_parts):
            return []
        (num,) = numbers
        runs = [self.oracle.run(share=Share(k, part, num)) for part in range(num)]
        return [run.known(k, kind) for run in runs]

    @property
    def _sizes(self) -> dict[str, int]:
        """Numbers by which a mistake may multiply, by what they count."""
        num, first = len(self.got), self.got[0]
        found = sizes_of(num, {"parts of the batch": first.num_parts or num, **first.axes})
        return {**found, **self.given_sizes}

    def _facts(self, k: int, first: Wrong) -> list[str]:
        """Facts that are seen beside the first difference, which may be its cause."""
        if k < 0:
            return ["Ranks must start from the reference's params: seed all alike, or broadcast."]
        if k < self.first:
            return []
        ours, theirs = self.oracle.recording.at(k), self.got[first.rank].at(k)
        lines = []
        # An optimizer's state is named by its param and a key
        for param in (first.leaf, first.leaf.rpartition(".")[0]):
            lines += _other_settings(param, ours, theirs)
        drawn = {"the reference": ours.draws, f"rank {first.rank}": theirs.draws}
        if any(drawn.values()):
            who = " and ".join(name for name, draws in drawn.items() if draws)
            lines.append(
                f"In this step {who} drew random numbers: dropout on ranks isn't the reference's."
            )
        return lines


def _check_names(kind: str, expected: Leaves, got: list[Leaves]) -> None:
    """Raise unless each leaf of the reference is on some rank, in its shape, and no other."""
    found = {name: leaf for values in got for name, leaf in values.items()}
    for name in [*expected, *found]:
        kinds = [_kind(x[name]) if name in x else "no such leaf" for x in (expected, found)]
        if kinds[0] != kinds[1]:
            raise AssertionError(
                explain(
                    f"the candidate and the reference recorded other leaves ({kind})",
                    path=name,
                    expected=kinds[0],
                    got=kinds[1],
                    remedy="record the same in both; names={...} maps the candidate's names, "
                    "and a dict of whole tensors may stand for a module or an optimizer",
                )
            )


def _kind(leaf: Tensor) -> str:
    """A leaf's shape and dtype; numbers have no dtype that counts."""
    return f"{tuple(leaf.shape)} {leaf.dtype}" if leaf.dim() else "a number"


def _differ(kind: str) -> str:
    kind = {"optimizer state": "optimizer's state", "start": "params"}.get(kind, kind)
    return f"the {kind} differs" if kind in _SINGULAR else f"the {kind} differ"


def _other_settings(param: str, ours: RecordedStep, theirs: RecordedStep) -> list[str]:
    """Words for what torch's optimizers show of a param: other settings, or another number of
    steps."""
    if theirs.settings and param in ours.settings and param not in theirs.settings:
        return [f"The candidate's optimizer has no param group with {param}."]
    wanted, found = (step.settings.get(param, {}) for step in (ours, theirs))
    return [
        f"The optimizer's {key} is {found[key]:.9g}, and {value:.9g} in the reference."
        for key, value in wanted.items()
        if key in found and not math.isclose(value, found[key])
    ]


def _floor(dtypes: Iterable[torch.dtype]) -> float:
    """The most that values may be off by without measuring, relative to the largest of their
    leaf."""
    real = [dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((REORDERED.get(d, _HALF * torch.finfo(d).eps) for d in real), default=0.0)


def _ratio(expected: Tensor, got: Tensor) -> float:
    """The multiple of the expected values that comes closest to what there is."""
    return float((expected.conj() * got).real.sum() / expected.abs().square().sum())
