"""The warning that all ranks are given the same batch: a sampler that doesn't know of ranks, say.

Then the step is right, and does the same work N times.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import EqualBatchesWarning, explain, warn
from ..step.rows import opened
from ..tree import content_digests, has_values, is_plain
from .words import digest_of

_MOST = 3  # batches that may be the same on all ranks


class EqualBatches:
    """Warns once in the life of a step, on rank 0: when three batches, each another one, were the
    same on all ranks. Ranks compare them in calls that are looked at, until they differ.

    A single batch, again and again, is that of a test, or of one who overfits it on purpose.
    """

    def __init__(self, num_parts: int) -> None:
        """`num_parts`: into which a batch is divided; ranks of the same data have one together."""
        self._done, self._seen = num_parts == 1, set[int]()

    def digest(self, batch: Any, *, look: bool) -> int:
        """A number above 0 for ranks to compare; 0: this one says nothing.

        With `look` values are read, for which the host waits.
        """
        if self._done or not look:
            return 0
        words: list[str] = []
        for leaf in opened(batch):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                if not is_plain(leaf) or not has_values(leaf):
                    return 0
                words += content_digests(leaf).values()
            elif not isinstance(leaf, Tensor | int | float):  # a count says nothing of the data
                words.append(_words_of(leaf))
        return digest_of(words) | 1 if words else 0

    def note(self, digest: int, same: bool | None, rank: int) -> None:
        """Warn, if it is time to.

        Args:
            digest: of this rank's batch.
            same: whether it is that of all ranks; None: they haven't been compared.
            rank: this one.
        """
        if same is None:
            return
        self._seen.add(digest)
        self._done = not same or len(self._seen) == _MOST
        if self._done and same and rank == 0:
            text = explain(
                f"all ranks were given the same batches, {_MOST} in turn: together they see no "
                "more data than one rank",
                remedy="give each rank its own part, x.tensor_split(group.size)[group.rank] for "
                "example, or a sampler that knows the rank; ranks of the same data are declared by "
                "a mesh's same_data",
            )
            warn(text, EqualBatchesWarning)


def _words_of(leaf: Any) -> str:
    """Words for an array or a list of values, which differ where these do."""
    return repr(leaf.tolist()) if hasattr(leaf, "tolist") else repr(leaf)
