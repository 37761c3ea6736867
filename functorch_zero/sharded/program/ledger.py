"""`Ledger`: the words that a rank owes the others in one step of a program, of its calls of the
library and of its gradients.

Note [words that wait]: ranks must make the same calls, start the same collectives and report the
same metrics. Each gradient knows its words when its backward has run, and posts them; nobody waits
for the other ranks then. One all-reduce settles them all: before the first write to storage that
is donated, which can't be undone, and at the end of the step. So k gradients take one message of
words, not k.

Meanwhile ranks that differ may start collectives that meet those of another call. Over gloo, where
their lengths differ, that ends a process by SIGABRT; where they are equal, it gives wrong sums,
which the settlement refuses. So in steps that all ranks look at, nothing waits: each call and each
gradient is compared at once, by a message of the same length as the one that settles. Other steps
find it out at the settlement, at no cost.

A training step makes one gradient, and an update that follows from it by the library's own code.
So its gradient's words settle all, with the flags that it asks for; neither the writing nor the end
of the step sends anything, nor do calls in steps that are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from torch import Tensor

from ...layout.piece import content_word, form_in_words
from ...layout.sharded_tree import ShardedTree
from ...params import Story, is_on_engine, nodes_of, without_engines
from ...step.loss import Metrics
from ...step.program import LossCall
from ...step.reminder import Reminder
from ...tree import is_within, named_leaves
from ..readable import values_in_words

_SMALL = 4096  # elements of a tensor that ranks compare in every step


class Posted(NamedTuple):
    """One gradient, whose words ranks have yet to compare."""

    # The names of its metrics, whether its loss gave a weight, its own name, and the collectives
    # started since; all ranks must have them equal
    words: Sequence[str]
    rows: Sequence[int]  # of this rank's batch, per tensor, if the loss gave no weight
    reminder: Reminder  # of ranks whose batches have other numbers of rows


class Agreement(Protocol):
    """The comparison of a program's ranks: each method raises, on every rank, where they differ.
    `AgreementOfRanks` makes it, and a plan another one.

    Attributes:
        is_by_gradients: whether each gradient compares all words so far, and nothing else does.
        own: names of the value's entries that each rank keeps for itself, as it does all buffers
            then.
    """

    is_by_gradients: bool
    own: Sequence[str]

    def on_arguments(self, given: Any, layouts: Any, seed: int | None, facts: Any) -> None: ...

    def on_first_value(self, value: Any, fills: Any) -> None: ...

    def looks_at(self, call: int) -> bool: ...

    def compare(
        self, ledger: Ledger, label: str, *, flags: Sequence[bool] = (), batch: Any = None
    ) -> list[bool]:
        """Compare ledgers, by one all-reduce. It raises, too, where a background task of any rank
        has failed. Returns the flags, each raised by any rank.

        Args:
            label: of the collective.
            flags: this rank's.
            batch: this rank's part, of which some calls note whether it is that of all ranks; None:
                it says nothing.
        """
        ...


class Ledger:
    """The words of one call of a program, on this rank.

    Args:
        step: its number.
        agreement: of the ranks.
        era: of the ranks: a step that is tried again makes other trees than the one that failed.
        look: whether the step is looked at, so that nothing waits. See Note [words that wait].

    Attributes:
        step, look: as given.
        is_by_gradients: as of the agreement.
        calls: of the library so far, in words that are the same on all ranks.
        gradients: of these calls.
        facts: by name, what the calls were given, as plain data that is equal on ranks that have
            made it alike. See Note [words] in `layout.piece`.
        leaf_words: by name of a fact that is a checksum, makes the same in words, for an error.
    """

    def __init__(self, step: int, agreement: Agreement, *, look: bool, era: int):
        self.step, self.look, self.is_by_gradients = step, look, agreement.is_by_gradients
        self._name = f"step {step}'s" if era == 0 else f"step {step}'s (era {era})"
        self.calls: list[str] = []
        self.gradients: list[Posted] = []
        self.facts: dict[str, Any] = {}
        self.leaf_words: dict[str, Callable[[], Any]] = {}
        self._compare, self._own = agreement.compare, agreement.own
        self._num_settled = 0  # gradients
        self._is_calling = False

    @property
    def takes_calls(self) -> bool:
        """Whether calls are noted: not those that the library makes itself, which follow from
        others; a training step's follow from the state that it is given."""
        return not (self._is_calling or self.is_by_gradients)

    @contextmanager
    def calling(self, call: LibraryCall) -> Iterator[str]:
        """Around a call of the library, which is noted. Gives the origin of its results."""
        self.calls.append(call.words)
        place = f"call {len(self.calls)} ({call.name})"
        for n, node in enumerate(call.nodes, 1):
            node.num_uses += 1
            self._note_story(f"tree {n} in {place}", node.story)
        for name, words in call.settings.items():
            self.facts[f"{name} in {place}"] = words
        for path, leaf in {} if self._own else call.buffers.items():
            self._note_leaf(f"buffer {path!r} in {place}", leaf)
        if self.look:
            self._compare(self, "step/calls")
        self._is_calling = True
        try:
            yield f"{self._name} result of {place}"
        finally:
            self._is_calling = False

    def note_given(self, path: str, given: Any) -> None:
        """Note a node of the value that the step is given: somebody may have changed it between the
        steps. Of trees that is their story. A program's calls note what they are given of leaves.
        """
        if isinstance(given, Story):
            self._note_story(f"the value's tree {path!r}", given)
        elif self.is_by_gradients and not is_within(path, self._own):
            self._note_leaf(f"the value's leaf {path!r}", given)

    def _note_story(self, name: str, story: Story) -> None:
        """Note how a tree was made, under a name of the tree."""
        self.facts[name], self.leaf_words[name] = story.word, story.tell
        if self.look:
            for n, leaf in enumerate(story.unread):
                self._note_leaf(f"number {n} in {name}", leaf)

    def _note_leaf(self, name: str, leaf: Any) -> None:
        """Note a leaf or number that every rank holds: its values where they are here and few, or
        the step is looked at, since a host waits for others, and their checksums take time."""
        if not isinstance(leaf, Tensor):
            self.facts[name] = repr(leaf)
        elif self.look or (leaf.is_cpu and leaf.numel() <= _SMALL):
            self.facts[name] = content_word(leaf, look=self.look)
            self.leaf_words[name] = partial(values_in_words, leaf)
        else:
            self.facts[name] = form_in_words(leaf)

    def settle(self) -> None:
        """Compare all words so far: this rank is about to write to what it was given."""
        if not self.is_by_gradients:
            self._compare(self, "step/before writing")

    def settle_by_gradient(self, flags: Sequence[bool], batch: Any) -> list[bool]:
        """Compare all words so far, those of a gradient last. Returns its flags, each raised by any
        rank.

        Args:
            batch: this rank's part.
        """
        # A program's batch is compared at the end of the step
        own = batch if self.is_by_gradients else None
        return self._compare(self, "gradient/metrics", flags=flags, batch=own)

    def settle_at_end(
        self, args: Sequence[Any], nodes: Mapping[str, Any], metrics: Metrics, num_draws: int
    ) -> None:
        """Compare all words of the step, and its results, after the calls that they follow from.

        Args:
            args: of the step, after the state: this rank's part of the batch.
            nodes: of the next value, by path.
            metrics: by name, 0-d.
            num_draws: of `fz.random`. Trees follow from them, and what losses are given.
        """
        self.facts = {"the number of draws of fz.random": num_draws} | self.facts
        for path, node in nodes.items():
            if is_on_engine(node):
                self._note_story(f"the next value's tree {path!r}", node.story)
            elif not is_within(path, self._own):
                self._note_leaf(f"leaf {path!r}", node)
        for name, metric in metrics.items():
            self._note_leaf(f"metric {name!r}", metric)
        # Sharded trees are no batch
        own = without_engines((*args,))
        self._compare(self, "step/agreement", batch=own)

    @property
    def num_rows(self) -> int:
        """Of the batches of gradients that wait, all tensors together, for ranks to compare."""
        return sum(self._waiting_rows)

    def settled(self, num_rows: tuple[int, int] | None, rank: int) -> None:
        """Note that ranks have found all words equal.

        Args:
            num_rows: the smallest and the largest of all ranks; None: they are equal.
            rank: this one.
        """
        if self._waiting:
            reminder = self._waiting[-1].reminder
            reminder.compare_ranks(self._waiting_rows, num_rows, rank)
        self._num_settled = len(self.gradients)

    @property
    def _waiting(self) -> Sequence[Posted]:
        return self.gradients[self._num_settled :]

    @property
    def _waiting_rows(self) -> list[int]:
        return [number for gradient in self._waiting for number in gradient.rows]


class LibraryCall:
    """A call of the library that a program makes.

    Args:
        name: of the function.
        given: its arguments.
        settings: by name, words for arguments that are no trees, such as an optimizer.

    Attributes:
        name, settings: as given.
        nodes: the sharded trees and states among the arguments, and among those of a loss.
    """

    def __init__(self, name: str, given: Sequence[Any], settings: Mapping[str, Any]):
        self.name, self.settings = name, settings
        # The trees that a gradient is taken of come first, as the user gives them
        self._losses = [x for x in given if isinstance(x, LossCall)]
        trees = [x for x in given if not isinstance(x, LossCall)]
        self.nodes = _nodes_among(trees + [x.args for x in self._losses])

    @property
    def words(self) -> str:
        """The function, its loss, and the labels of its trees. A tree's gradients have its
        label."""
        words = [self.name]
        for loss in self._losses:
            author = loss.counted
            words.append(f"of {getattr(author, '__qualname__', type(author).__name__)}")
        labels = [node.holding.label for node in self.nodes if isinstance(node, ShardedTree)]
        if labels:
            words.append(f"at {' and '.join(labels)}")
        return " ".join(words)

    @property
    def origin(self) -> str:
        """That of the trees that the call gives back, where no ledger counts it: outside of steps,
        and in threads that a program starts."""
        told = [[node.story.word for node in self.nodes], dict(self.settings)]
        return f"the result of {self.words} of #{crc32(repr(told).encode()):08x}"

    @property
    def buffers(self) -> dict[str, Any]:
        """Those of a loss, by path: every rank must give it the same."""
        found: dict[str, Any] = {}
        for loss in self._losses:
            found |= named_leaves(loss.buffers)
        return found


def name_results(made: Any, origin: str) -> None:
    """Name the sharded trees and states that a call has made by their numbers among its results;
    the only one has none."""
    nodes = _nodes_among(made)
    for n, node in enumerate(nodes):
        node.origin = node.origin or (f"{origin}.{n}" if len(nodes) > 1 else origin)


def _nodes_among(tree: Any) -> list[Any]:
    """The sharded trees and states in a tree."""
    return [*filter(is_on_engine, nodes_of(tree))]
