"""The agreement of ranks on a program: on the arguments of its `init`, on its first value, and in
each step on its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import GroupError, MismatchError
from ...groups import labelled
from ...groups.protocol import Group
from ...layout.layout import Layout
from ...model.untouched import is_looked_at
from ...optim.base import Transform
from ...optim.naming import described
from ...params import as_local
from ...step.program_step import ProgramStep
from ...tree import is_within, paths
from ..agreement import agree, first_difference, first_unlike, releases_and_ranks
from ..average import other_collectives
from ..background import BackgroundTasks
from ..deferred_values import DigestedFill
from ..equal_batches import EqualBatches
from ..options import Options
from ..readable import told_apart, told_values
from ..words import exchange_data, tell
from .ledger import Ledger
from .value import unsharded_leaves


class AgreementOfRanks:
    """The comparison of a program's ranks. Each method is one exchange, or one all-reduce of words,
    and raises, on every rank, where they differ.

    Of a training step, the gradient settles all. Nothing else is sent in a step, and nothing waits
    for the next one: what is made after the gradient follows from what ranks have compared, by the
    library's own code. Trees, buffers and scales that the next step is given are in its gradient's
    words.

    Args:
        step: the program.
        options: those of `shard`.
        background: the step's tasks, whose failures all ranks learn here.
    """

    def __init__(self, step: ProgramStep, options: Options, background: BackgroundTasks):
        self._options, self._background = options, background
        self.is_by_gradients = step.is_training_step
        self.own: Sequence[str] = step.buffers if options.sync_buffers == "local" else ()
        self._batches = EqualBatches(options.axes.data.size)

    def on_arguments(
        self,
        given: Mapping[str, Any],
        layouts: Mapping[str, Layout],
        seed: int | None,
        facts: Mapping[str, Any],
    ) -> None:
        """Compare the arguments of `init`, by name.

        Args:
            given: the trees that are cut.
            layouts: of these.
            seed: of the first state.
            facts: of `program_step`; the optimizer of a training step among them.
        """
        options = self._options
        # Plain data, and causes before their effects
        found = releases_and_ranks(options.group)
        found |= {
            "level": options.levels.describe(),
            "options": options.describe(),
            "facts of program_step": {n: x for n, x in facts.items() if not _is_transform(x)},
            "seed": seed,
        }
        found |= {name: described(x) for name, x in facts.items() if _is_transform(x)}
        for name, layout in layouts.items():
            found[f"layout of {name}"] = layout.describe()
            found[f"levels of {name}"] = {leaf.path: leaf.cut.level_name for leaf in layout.leaves}
        for name in layouts:
            found[f"values of {name}"] = told_values(given[name])
        agree(labelled(options.group, "init/agreement"), found)

    def on_first_value(self, value: Any, fills: Mapping[str, DigestedFill]) -> None:
        """Compare what `init` has made.

        Args:
            value: as it returned it.
            fills: of trees whose values each rank has made, and which could not be compared before.
        """
        # Nothing else would show that the rest beside sharded trees differs
        facts: dict[str, Any] = {"the first value": paths(as_local(value))}
        leaves = unsharded_leaves(value)
        leaves = {path: leaf for path, leaf in leaves.items() if not is_within(path, self.own)}
        numbers = {path: repr(x) for path, x in leaves.items() if not isinstance(x, Tensor)}
        for path, words in (numbers | told_values(leaves)).items():
            facts[f"values of {path!r} in the first value"] = words
        for name, fill in fills.items():
            facts[f"deferred values of {name}"] = fill.digests
        agree(labelled(self._options.group, "init/agreement"), facts)

    def looks_at(self, call: int) -> bool:
        """Whether a call of this number is looked at closely."""
        return is_looked_at(call)

    def compare(
        self, ledger: Ledger, label: str, *, flags: Sequence[bool] = (), batch: Any = None
    ) -> list[bool]:
        """As `Agreement` says. Only when ranks differ, an exchange of JSON follows."""
        group = labelled(self._options.group, label)
        gradients = [gradient.words for gradient in ledger.gradients]
        found = _Findings(ledger.step, ledger.calls, gradients, ledger.facts, {})
        digest = self._batches.digest(batch, look=ledger.look)
        # Ranks at different calls of a step send equal lengths, since `tell` does
        all_flags = [self._background.failed(), *flags]
        told = tell(found.words, all_flags, group, ledger.num_rows, digest)
        if not told.alike:
            values = {name: in_words() for name, in_words in ledger.leaf_words.items()}
            everyone = exchange_data(group, found._replace(values=values))
            raise _difference([_Findings(*theirs) for theirs in everyone], ledger, group)
        ledger.settled(told.sizes, group.rank)
        has_failed, *raised = told.flags
        self._background.raise_if(has_failed)
        self._batches.note(digest, told.same_batch, group.rank)
        return raised


def _is_transform(fact: Any) -> bool:
    return isinstance(fact, Transform)


class _Findings(NamedTuple):
    """The words of one rank in a step, for errors."""

    step: int  # its number
    calls: Sequence[str]  # of the library
    gradients: Sequence[Sequence[str]]  # of these, those whose words have waited
    facts: Mapping[str, Any]  # plain data, causes before their effects
    values: Mapping[str, Any]  # of facts that are digests, in words, or words by leaf

    @property
    def words(self) -> list[str]:
        """Those that all ranks must have equal."""
        of_gradients = [word for words in self.gradients for word in words]
        count = f"{len(self.calls)} calls"
        return [
            f"step {self.step}",
            count,
            *self.calls,
            *of_gradients,
            *map(repr, self.facts.items()),
        ]


def _difference(everyone: Sequence[_Findings], ledger: Ledger, group: Group) -> Exception:
    """The error that tells in what the ranks differ first: causes before their effects."""
    own_rank = group.rank
    steps = [each.step for each in everyone]
    if len(set(steps)) > 1:
        return GroupError(
            f"the ranks are at different steps: {steps}, in the order of ranks. Remedy: make every "
            "rank take the same steps"
        )
    calls = [each.calls for each in everyone]
    if any(theirs != calls[0] for theirs in calls):
        return _other_calls(steps[0], calls, own_rank)
    gradients = [each.gradients for each in everyone]
    if any(theirs != gradients[0] for theirs in gradients):
        return other_collectives(group, _first_log_apart(gradients, ledger))
    facts = [each.facts for each in everyone]
    rank = first_unlike(facts)
    name, ours, other = first_difference(facts[0], facts[rank])
    one, two = (everyone[n].values.get(name) for n in (0, rank))
    # Words may leave out the elements that differ
    if one is not None and two is not None and one != two:
        name, ours, other = first_difference(one, two, name)
    ours, other = told_apart(ours, other)
    what, remedy = _OF_STEP if ledger.is_by_gradients else _OF_PROGRAM
    return MismatchError(
        f"{what} between ranks: {name} is {ours} on rank 0 and {other} on rank {rank} (this is "
        f"rank {own_rank}). Remedy: {remedy}"
    )


_OF_PROGRAM = (
    "the program's results differ",
    "make of each rank's own batch only what fz.value_and_grad gives, a loss and "
    "Aux(metrics=...), which are means over ranks; branch and scale by these",
)
_OF_STEP = (
    "the step is given a state that differs",
    "change a state between steps in the same way on every rank",
)


def _first_log_apart(gradients: Sequence[Sequence[Sequence[str]]], ledger: Ledger) -> Sequence[str]:
    """This rank's log of the first gradient in which ranks differ."""
    for n, own in enumerate(ledger.gradients):
        if any(theirs[n : n + 1] != gradients[0][n : n + 1] for theirs in gradients):
            return own.log
    return []


def _other_calls(step: int, calls: Sequence[Sequence[str]], own_rank: int) -> GroupError:
    """The error of ranks that have made other calls: it tells the first one that differs."""
    rank = first_unlike(calls)
    # An end that comes sooner is a difference, too
    pairs = [*zip_longest(calls[0], calls[rank], fillvalue="missing")]
    number = next(n for n, (expected, other) in enumerate(pairs) if expected != other)
    expected, other = pairs[number]
    return GroupError(
        f"the ranks make different calls in step {step} of a program: call {number + 1} is "
        f"{expected} on rank 0, and {other} on rank {rank} (this is rank {own_rank}). A tree goes "
        "by its path in the value, and so do its gradients. Remedy: make the same calls of the "
        "library on every rank, in the same order; branch on a number that is the same on all "
        "ranks, such as a metric that the loss gives by fz.Aux(metrics=...)"
    )
