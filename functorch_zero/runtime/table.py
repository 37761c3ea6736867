"""Lookups of a table whose rows lie on several ranks.

Each rank holds whole rows, as many as the others. A lookup makes its ids unique, so that a row that
a batch names often travels once. Three all-to-alls along the shard axis follow: how many rows are
asked of each rank, which, and the rows. In backward one more sends the rows' gradients back to
their holders, who remember what was asked, and add up. So a table is never whole anywhere, nor is
its gradient.

Note [rows of the same data]: along an axis of the same data each rank asks for the same rows, and
has the same gradients of them. A holder then takes its own, and nothing travels back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import explain
from ..groups import labelled
from ..groups.mesh import Axis
from ..groups.protocol import Group
from ..layout.layout import Bucket
from .unshard import ResidentFlats


class Asked(NamedTuple):
    """The rows that a rank asks for, apart for their holders."""

    ids: Tensor  # (k,) int64, each once, in order: those of rank 0 first
    counts: list[int]  # of each rank's, k together
    counts_beside: Tensor  # (num_ranks,) int64, the same beside the ids


class Requests(NamedTuple):
    """The rows that a rank is asked for."""

    rows: Tensor  # (m,) int64, their numbers among those here; rank 0's requests first
    counts: list[int]  # of each rank, m together


def exchange_rows(
    rows: Tensor, counts: Sequence[int], out_counts: Sequence[int], group: Group
) -> Tensor:
    """Rows (k, columns), so many for each rank -> the rows (m, columns) that arrive, so many of
    each. One all-to-all."""
    columns = rows.shape[1]
    out = rows.new_empty(sum(out_counts), columns)
    sizes, out_sizes = ([n * columns for n in of_ranks] for of_ranks in (counts, out_counts))
    group.all_to_all(out.view(-1), out_sizes, rows.contiguous().view(-1), sizes).wait()
    return out


class Reading:
    """Questions of a lookup for which the host reads values."""

    def ask(self, ids: Tensor, rows_per_rank: int, num_ranks: int) -> tuple[Asked, Tensor]:
        """The rows that ids of any shape name, and each id's place among these, in the ids' shape
        and dtype."""
        wanted, places = ids.unique(return_inverse=True)  # sorted, and so in the order of ranks
        counts = torch.bincount(wanted // max(rows_per_rank, 1), minlength=num_ranks)
        return Asked(wanted.to(torch.int64), counts.tolist(), counts), places.to(ids.dtype)

    def outside(self, ids: Tensor, num_rows: int) -> int | None:
        """An id that is no row's; None: all are."""
        found = ids[(ids < 0) | (ids >= num_rows)]
        return int(found[0]) if len(found) else None

    def number_of(self, row: int, asked: Asked) -> int | None:
        """The place of a row among those asked for; None: it isn't asked for."""
        found: list[int] = (asked.ids == row).nonzero().flatten().tolist()
        return found[0] if found else None

    def counts_of_others(self, asked: Asked, group: Group) -> list[int]:
        """How many rows each rank asks of this one. One all-to-all."""
        received, ones = torch.empty_like(asked.counts_beside), [1] * group.size
        group.all_to_all(received, ones, asked.counts_beside, ones).wait()
        counts: list[int] = received.tolist()
        return counts


class TableFlats(ResidentFlats):
    """A table's flats during one pass: this rank's rows, which stay where they lie.

    Args:
        flat: (rows * columns,), as held between steps.
        bucket: the table's.
        axis: along which the ranks hold the other rows.
        log: of the collectives started, which ranks compare.
        path: of the table.
        rank: this one's number among all, for errors.

    Attributes:
        reading: what is read of values, of which a plan has none.
    """

    def __init__(
        self, flat: Tensor, bucket: Bucket, axis: Axis, log: list[str], path: str, rank: int
    ):
        super().__init__([flat], [bucket])
        self.bucket, self.axis, self.path, self.rank = bucket, axis, path, rank
        (self.shape,) = bucket.shapes
        self.rows = flat.detach().view(-1, self.shape[1])
        self._log = log
        self.reading = Reading()

    def ask(self, ids: Tensor) -> tuple[Asked, Tensor]:
        """The rows that ids name, and each id's place among these.

        Raises:
            IndexError: there is no such row. No rank has been asked for anything then.
        """
        wrong = self.reading.outside(ids, self.shape[0])
        if wrong is not None:
            raise IndexError(
                explain(
                    "a table was asked for a row that it doesn't have",
                    path=self.path,
                    expected=f"ids from 0 to {self.shape[0] - 1}",
                    got=wrong,
                    rank=self.rank,
                )
            )
        return self.reading.ask(ids, len(self.rows), self.axis.size)

    def exchange_ids(self, asked: Asked) -> Requests:
        """Ask the holders for rows, and learn what is asked for here. Two all-to-alls."""
        self._log.append(f"rows of {self.path}")
        group = self._group("ids")
        counts = self.reading.counts_of_others(asked, group)
        ids = asked.ids.new_empty(sum(counts))
        group.all_to_all(ids, counts, asked.ids, asked.counts).wait()
        return Requests(ids - len(self.rows) * group.rank, counts)

    def rows_to(self, requests: Requests, asked: Asked) -> Tensor:
        """The rows (k, columns) that were asked for, as they are used: each holder rounds those
        that it sends to the dtype of gathers."""
        assert isinstance(self.bucket.gather, torch.dtype)  # a layout has no other of a table
        sent = self.rows[requests.rows].to(self.bucket.gather)
        arrived = exchange_rows(sent, requests.counts, asked.counts, self._group("rows"))
        return arrived.to(self.bucket.compute)

    def grads_from(self, grads: Tensor, asked: Asked, requests: Requests) -> tuple[Tensor, Tensor]:
        """Gradients (k, columns) of the rows asked for -> those of rows here, and the rows'
        numbers, which may come several times. See Note [rows of the same data]."""
        if self.axis.holds_different_data:
            group = self._group("reduce")
            return requests.rows, exchange_rows(grads, asked.counts, requests.counts, group)
        rank = self.axis.rank
        return requests.rows.split(requests.counts)[rank], grads.split(asked.counts)[rank]

    def _group(self, what: str) -> Group:
        return labelled(self.axis.group, f"{self.path}/{what}")


class Lookup:
    """The exchange of one lookup: see `Exchange`.

    Args:
        flats: the table's.
        asked: the rows.
        take: takes gradients of rows here, and the rows' numbers; None: there will be none.
        scale: of this rank's gradients.
    """

    def __init__(
        self,
        flats: TableFlats,
        asked: Asked,
        take: Callable[[Tensor, Tensor], None] | None,
        scale: Callable[[Tensor], Tensor],
    ):
        self.word = f"rows of {flats.path}"
        self._flats, self._asked, self._take, self._scale = flats, asked, take, scale
        self._requests: Any = None  # Requests, since `there`

    def there(self, x: Tensor) -> Tensor:
        """The rows (k, columns). `x` only ties them to the pass."""
        self._requests = self._flats.exchange_ids(self._asked)
        return self._flats.rows_to(self._requests, self._asked)

    def back(self, grad: Tensor) -> None:
        """Give gradients of the rows (k, columns) to the holders."""
        assert self._take is not None
        scaled = self._scale(grad.to(self._flats.bucket.summed_in))
        rows, grads = self._flats.grads_from(scaled, self._asked, self._requests)
        self._take(rows, grads)
