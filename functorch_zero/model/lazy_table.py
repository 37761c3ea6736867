"""`LazyTable`: a table as a loss sees it, whose rows lie on several ranks. A lookup asks for rows.

`F.embedding` and `F.embedding_bag` of a table are torch's own, of a small table with the rows that
these ids name, each once: so padding, bags and their weights mean what they mean elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from optree import tree_leaves
from torch import Tensor
from torch.overrides import resolve_name

from .._torch_private import transforms_active
from ..errors import StructureError
from .lazy_param import LazyParam


class Found(NamedTuple):
    """The rows of one lookup."""

    rows: Tensor  # (k, columns), each row once; differentiable
    places: Tensor  # of each id among them, in the shape and dtype of the ids
    padding: int | None  # the place of the row that padding names, if an id names it


class TableEntrance(Protocol):
    """How the rows of a table are asked for."""

    @property
    def path(self) -> str:
        """The dotted path of the table's leaf."""
        ...

    def find(self, ids: Tensor, padding: int | None) -> Found:
        """The rows that these ids name; `padding` is a row's number, or None."""
        ...


class LazyTable(LazyParam):
    """A table that is never whole: `F.embedding`, `F.embedding_bag` and their modules look up its
    rows. Any other operator on it raises."""

    entrance: TableEntrance  # type: ignore[assignment]

    def whole(self) -> Tensor:
        raise self._is_read("fz.unshard")

    @classmethod
    def on_operator(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Torch hands both functions on with ids and table in front, and all else by name
        if func in (F.embedding, F.embedding_bag) and type(args[1]) is LazyTable:
            ids, table = args
            table.is_asked = False
            found = table._find(
                ids, kwargs["padding_idx"], kwargs["max_norm"], kwargs["scale_grad_by_freq"]
            )
            of_rows = {**kwargs, "padding_idx": found.padding, "sparse": False}
            return func(found.places, found.rows, **of_rows)
        if not cls.is_answered(func):
            table = next(x for x in tree_leaves((args, kwargs)) if type(x) is LazyTable)
            raise table._is_read(resolve_name(func) or func.__name__)
        return super().on_operator(func, types, args, kwargs)

    def _find(
        self,
        ids: Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        scale_grad_by_freq: bool,
    ) -> Found:
        """The rows that these ids name."""
        if transforms_active():
            raise _refused(
                self.entrance.path,
                "a table was looked up inside of a transform of torch.func, which may hide the ids",
                got="a lookup in grad, vmap or their like",
            )
        if max_norm is not None:
            raise _refused(
                self.entrance.path,
                "max_norm writes to the rows that a batch names, while others read them",
                got=f"max_norm={max_norm}",
            )
        if scale_grad_by_freq:
            raise _refused(
                self.entrance.path,
                "scale_grad_by_freq divides by how often the whole batch names a row, and each "
                "rank has a part of it",
                got="scale_grad_by_freq=True",
            )
        num_rows = self.shape[0]
        if padding_idx is not None and not -num_rows <= padding_idx < num_rows:
            raise AssertionError("Padding_idx must be within num_embeddings")  # as torch does
        padding = None if padding_idx is None else padding_idx % num_rows
        return self.entrance.find(ids, padding)

    def _is_read(self, reader: str) -> StructureError:
        path = self.entrance.path
        return _refused(
            path,
            "a table was read as a whole, as by a head that is tied to it or by a penalty, and "
            "each rank holds rows of it",
            got=reader,
        )


def _refused(path: str, why: str, *, got: str) -> StructureError:
    return StructureError(
        why,
        path=path,
        expected="F.embedding or F.embedding_bag of the table, or their modules",
        got=got,
        remedy=f'level={{"": 3, "{path}": 3}}, say, which gathers it as other leaves',
    )
