"""The agreement of ranks on a program: on the arguments of its `init`, on its first value, and in
each step on its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...errors import GroupError, MismatchError
from ...groups import labelled
from ...layout.layout import Layout
from ...model.untouched import is_looked_at
from ...optim.base import Transform
from ...optim.naming import described
from ...params import as_local, is_on_engine
from ...step.background import Background
from ...step.program_step import ProgramStep
from ...tree import is_within, paths
from ..agreement import agree, difference_in_words, releases_and_ranks
from ..deferred_values import DigestedFill
from ..equal_batches import EqualBatches
from ..options import Options
from ..readable import told_story, told_values
from ..words import exchange_data, tell
from .ledger import Ledger
from .value import Nodes


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
        background: the step's, whose failure all ranks learn here.
    """

    def __init__(self, step: ProgramStep, options: Options, background: Background):
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
        # Nothing else would show that it differs: the first step begins with it as it is
        facts: dict[str, Any] = {"the first value": paths(as_local(value))}
        leaves: dict[str, Any] = {}
        for path, node in Nodes.of(value).by_path.items():
            if is_on_engine(node):
                facts[f"the first value's tree {path!r}"] = told_story(node.story)
            elif not is_within(path, self.own):
                leaves[path] = node
        others = {path: repr(x) for path, x in leaves.items() if not isinstance(x, Tensor)}
        for path, words in (others | told_values(leaves)).items():
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
        gradients = {f"gradient {n}": own.words for n, own in enumerate(ledger.gradients, 1)}
        calls = {f"call {n}": call for n, call in enumerate(ledger.calls, 1)}
        # Causes before their effects
        found = ledger.step, calls, gradients, ledger.facts
        digest = self._batches.digest(batch, look=ledger.look)
        # Ranks at different calls of a step send equal lengths, since `tell` does
        all_flags = [self._background.failed(), *flags]
        told = tell([repr(found)], all_flags, group, ledger.num_rows, digest)
        if not told.alike:
            values = {name: in_words() for name, in_words in ledger.leaf_words.items()}
            raise _difference(exchange_data(group, [*found, values]), ledger, group.rank)
        ledger.settled(told.sizes, group.rank)
        has_failed, *raised = told.flags
        try:
            self._background.raise_if(has_failed)
        except Exception as error:
            # All ranks leave, to come back together. `sharing_failures` wouldn't, as it takes a
            # `PeerError` for one of this group
            group.fail(error)
            raise
        self._batches.note(digest, told.same_batch, group.rank)
        return raised


def _is_transform(fact: Any) -> bool:
    return isinstance(fact, Transform)


def _difference(everyone: Sequence[Any], ledger: Ledger, own_rank: int) -> Exception:
    """The error that tells in what the ranks differ first.

    Args:
        everyone: the words of each rank: the number of its step; its calls, gradients and facts by
            name; and of facts that are digests the same in words, or words by leaf.
    """
    steps, *by_kind, values = zip(*everyone, strict=True)
    if len(set(steps)) > 1:
        return GroupError(
            f"the ranks are at different steps: {[*steps]}, in the order of ranks. Remedy: make "
            "every rank take the same steps"
        )
    errors = [_OTHER_CALLS, _OTHER_COLLECTIVES, _OF_STEP if ledger.is_by_gradients else _OF_PROGRAM]
    words, (error, what, remedy) = next(
        (words, error)
        for words, error in zip(by_kind, errors, strict=True)
        if any(theirs != words[0] for theirs in words)
    )
    name, difference = difference_in_words(words)
    # Words may leave out the elements that differ
    told = [own.get(name) for own in values]
    if None not in told and any(own != told[0] for own in told):
        _, difference = difference_in_words(told, name)
    return error(
        f"in step {ledger.step}, {what}: {difference} (this is rank {own_rank}). Remedy: {remedy}"
    )


_OTHER_CALLS = (
    GroupError,
    "the ranks make different calls",
    "make the same calls of the library on every rank, in the same order; a tree goes by its path "
    "in the value, and so do its gradients; branch on a number that is the same on all ranks, such "
    "as a metric that the loss gives by fz.Aux(metrics=...)",
)
_OTHER_COLLECTIVES = (
    GroupError,
    "the ranks have not started the same collectives, or report other metrics",
    "call the same units in the same order on every rank, return the same metrics, and give a "
    "weight on all ranks or on none",
)
_OF_PROGRAM = (
    MismatchError,
    "the program's results differ between ranks",
    "make of each rank's own batch only what fz.value_and_grad gives, a loss and "
    "Aux(metrics=...), which are means over ranks; branch and scale by these",
)
_OF_STEP = (
    MismatchError,
    "the state that is given differs between ranks",
    "change a state between steps in the same way on every rank",
)
