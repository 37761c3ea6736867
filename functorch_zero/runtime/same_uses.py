"""Agreement of ranks on the units that a pass uses.

Note [same uses]: the units that a loss uses, in their order, decide which collectives a pass
starts: the gathers of forward and, by Note [order of reductions], all of backward. Ranks that use
other units would start collectives that don't meet: they hang, or gloo ends a healthy process.

So a rank starts a collective only where it knows that the others do. A pass that uses the same
units as the last one knows it without asking. In a first pass the ranks compare each use, by an
exchange. A rank that leaves the way of the last pass can't begin an exchange: the others, still on
that way, would start a gather instead. So it asks apart from all collectives (`all_say`). Where all
ranks leave alike (layers dropped by a common seed, a longer batch), they go on, and compare each
further use as in a first pass. Else the rank raises, and the others hear of it where they wait.

The exchanges that a loss starts itself have their places among the uses. Where nothing else follows
from uses, at levels 0 and 1, words are of exchanges alone. Losses without any say nothing there,
and begin as if the last pass had ended without a word. So they compare nothing, and ranks whose
first exchange comes ask.

Ranks may come late to a question, from an evaluation say, and it has a time limit. So ranks that
have left a way once compare all uses, until some passes in a row were equal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ..errors import GroupError
from ..groups import labelled
from ..groups.checks import by_rank
from ..groups.forwarding import all_say
from ..groups.protocol import Group
from .unshard import UnitFlats

END = "the end of the loss"


class SameUses:
    """The uses of one pass, in words, beside those of the last pass and of other ranks.

    Args:
        group: all ranks, which can ask each other (`all_say`).
        last: the words of the last pass; None: none are known that hold for all ranks.
        flats: of each unit.
        trusted: whether a rank that finds the words of the last pass asks nobody.

    Attributes:
        of_units: whether collectives follow from uses of units. Else words are of exchanges alone.
        words: of this pass so far. A pass adds those that collectives follow from.
        left: whether they differ from those of the last pass.
        patience: seconds that ranks may come late to a question; at least as long as the pass has
            taken.
        of_two, alone, remedy: of errors: ranks say different words; a rank alone has left.
    """

    patience = 10.0
    of_two = "the ranks' losses use different units or exchanges, or the same in another order"
    alone = (
        "the loss uses other units or exchanges than in the last pass, and not every rank does so "
        "alike"
    )
    remedy = (
        "let the data of every rank go through the same units: with rows of weight 0, say; or let "
        "the module around the layer be the unit, by functionalize(units=...), or each child of "
        'the model, by units="*"; or use level 0 or 1, where ranks may use different units. Call '
        "the functions of fz.batch, and look up a table, on every rank, also on one without rows"
    )

    def __init__(
        self,
        group: Group,
        last: Sequence[str] | None,
        flats: Sequence[UnitFlats],
        *,
        trusted: bool,
        of_units: bool = True,
    ):
        self.of_units = of_units
        self.words: list[str] = []
        self.left = False
        self._group, self._last, self._flats = group, last, flats
        # Whether ranks compare each use by an exchange. They begin to where one has had to ask
        self._compares = last is None or not trusted
        self._num_checked = 0  # words that all ranks are known to have said
        self._begin = time.monotonic()

    def check_end(self) -> None:
        """The loss has returned: check that no rank uses more units."""
        self.words.append(END)
        self.check()

    def check(self) -> None:
        """Before a collective: return when all ranks are known to say the same words until here.

        Raises:
            GroupError: they don't, or PeerError where another rank found out first.
        """
        begin, end = self._num_checked, len(self.words)
        self._num_checked = end
        got = self.words[begin:]
        expected = got if self._last is None else self._last[begin:end]
        # Left: this rank's words are no longer those of the last pass
        self.left |= got != expected
        if self._compares:
            self._compare(got)
        elif self.left:
            self._ask(expected, got)
            self._compares = True

    def _ask(self, expected: Sequence[str], got: Sequence[str]) -> None:
        """Return if all ranks leave the way of the last pass here, with these words."""
        ask = all_say(self._group)
        assert ask is not None
        # Gathers that are under way arrive when all ranks are in this pass: then none is very late
        for flats in self._flats:
            for gathering in flats.under_way or ():
                gathering.work.wait()
        seconds = max(self.patience, time.monotonic() - self._begin)
        # All words, so that ranks that leave at another place ask something else
        if ask(json.dumps(self.words), seconds):
            return
        want, have = next(_differences([expected, got]))
        error = GroupError(
            f"{self.alone}: others went on as before, or were {seconds:.0f} s late",
            path=_path_of([want, have]),
            expected=f"{want}, as in the last pass",
            got=have,
            rank=self._group.rank,
            remedy=self.remedy,
        )
        # The others may wait for this rank in a gather
        self._group.fail(error)
        raise error

    def _compare(self, got: Sequence[str]) -> None:
        """Raise, on every rank, unless all ranks say the same. By one exchange."""
        everyone = labelled(self._group, "loss/uses").exchange(json.dumps(got).encode())
        if len(set(everyone)) == 1:
            return
        said = next(_differences([json.loads(words) for words in everyone]))
        raise GroupError(
            self.of_two,
            path=_path_of(said),
            expected="the same one on every rank",
            got=by_rank(said),
            rank=self._group.rank,
            remedy=self.remedy,
        )


def _differences(said: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """The words that differ, place by place."""
    for words in zip_longest(*said, fillvalue=END):
        if len(set(words)) > 1:
            yield words


def _path_of(words: Sequence[str]) -> str:
    """The unit among the words that others lack."""
    return next(word for word in words if word != END).partition(",")[0]
