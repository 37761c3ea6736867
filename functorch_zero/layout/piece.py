"""`Piece`: a leaf of a sharded tree, as everybody outside of this library sees it.

It shows the whole leaf's shape, and holds what this rank has of it. Where ranks hold parts, only
pointwise operators run, on pieces of the same part and numbers; everything else raises. Where every
rank holds the whole leaf, any operator runs: a pointwise one of such pieces gives a piece, others
plain tensors.

Note [words]: a pointwise function may still be one rank's own: by a factor that it has made of its
part of the batch, or in a branch that it alone takes. So each piece remembers how it was made: the
operator, its operands' words, and numbers. Its word, a checksum of that, is the same on all ranks
that have made it alike. The words of a tree are compared where the tree comes back to the library,
in the messages that are sent anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._torch_private import (
    disabled_torch_function,
    make_wrapper,
    run_untraced,
    version_of,
    written_of,
)
from ..devices import number_on
from ..errors import DonatedError, StructureError, users_line
from ..params import Story
from ..tree import content_digest, dotted, has_values, tensors_among
from .extent import Extent
from .home import Home, Lease
from .operators import kind_of

_LONG = 200  # characters of an operand's words
_MANY = 16  # numbers of a piece


@dataclass(slots=True, eq=False)
class History:
    """How a piece was made. The piece's aliases share it, so that a write to one shows in all.

    Attributes:
        text: in words that are the same on all ranks.
        numbers: 0-d tensors on a device that it was made with, whose values nobody has read.
        path: in the value that a program was given, of a leaf of it, which it may not write to.
        version: of the piece, after the last operator that is in the text; 0 as of a new tensor.
        opened: the word of the values, once somebody may write to them without an operator.
        lease: of the node that owns the tensor; None: it is the piece's own.
        number: which leaf of that home it is.
        is_brought: whether the tensor is a copy of what lies in a place.
    """

    text: str
    numbers: tuple[Tensor, ...] = ()
    path: str | None = field(default=None, kw_only=True)
    version: int = 0
    opened: str | None = None
    lease: Lease | None = field(default=None, kw_only=True)
    number: int = field(default=0, kw_only=True)
    is_brought: bool = field(default=False, kw_only=True)


def _reading(name: str) -> Any:
    """The tensor's method of this name: a way to the values, or to the storage, that runs no
    operator."""

    def read(piece: Piece, *args: Any, **options: Any) -> Any:
        if not piece.is_whole:
            refuse(f"Tensor.{name} reads their values", piece, _ASK)
        found = piece.here
        piece.history.opened = content_word(found)
        return getattr(found, name)(*args, **options)

    return read


class Piece(Tensor):
    """This rank's part of a leaf.

    Args:
        local: (extent.num_here,), or of the leaf's shape where `is_whole`; without gradients.
        extent: the part. The piece shows the whole leaf's shape.
        is_whole: whether every rank holds all of the leaf, by its layout.
        history: how it was made.
        requires_grad: as of any tensor; by it, trained leaves are known.
    """

    extent: Extent
    is_whole: bool
    history: History
    _local: Tensor

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        extent: Extent,
        *,
        is_whole: bool,
        history: History,
        requires_grad: bool = False,
    ) -> Piece:
        of_storage = (None, None, None)  # strides, offset and memory format, which it has none of
        form = (local.dtype, torch.strided, local.device, False)  # not pinned
        made: Piece = make_wrapper(cls, extent.shape, *of_storage, *form, requires_grad)
        made._local, made.extent = local, extent
        made.is_whole, made.history = is_whole, history
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = _Call(func, args, kwargs or {})
        if all(piece.is_whole for piece in call.pieces):
            return _run_on_whole(call)
        if call.kind.makes_new:
            return func(call.first.here, *args[1:], **call.kwargs)
        if (shape := call.shape_alike) is not None:
            return call.first.reshaped(shape)
        call.check()
        return _run_on_foreach(call) if call.kind.is_foreach else _run(call)

    @property
    def local(self) -> Tensor:
        """A copy of what this rank holds. A write to the values themselves would be in no
        words."""
        return self.here.clone()

    @property
    def here(self) -> Tensor:
        """The values that are here, for this library.

        Raises:
            DonatedError: a step has written others over them.
        """
        if self.is_used_up:
            raise DonatedError(
                "a leaf was read that was donated to a step, and its storage holds the next "
                "state's now",
                got=self.history.text,
                remedy="read the leaf of the state that the step returned, keep a copy with "
                "leaf.clone(), or shard with donate=False",
            )
        self.note_foreign_writes()
        return self._local

    @property
    def is_used_up(self) -> bool:
        """Whether a step has written other values over these."""
        lease = self.history.lease
        return lease is not None and lease.has_ended

    @property
    def as_cut(self) -> Tensor:
        """The values as the library has cut them from a flat; else `here`."""
        here, home = self.here, self.history.lease
        if isinstance(home, Home) and home.leaves is not None:
            leaf: Tensor = home.leaves[self.history.number]
            return leaf
        return here

    def note_foreign_writes(self) -> None:
        """Note those by plain views and arrays, which whole leaves alone have. They count for the
        piece."""
        if self.is_whole and self._may_be_written():
            self.note_write(content_word(self._local))

    def _may_be_written(self) -> bool:
        """Whether somebody may have written to the values since the last operator."""
        history = self.history
        # Tensors of inference mode count no writes
        if self.is_inference() or history.version != _version_of(self):
            return True
        return history.opened is not None and history.opened != content_word(self._local)

    def note_write(self, text: str, numbers: tuple[Tensor, ...] = (), *, coming: int = 0) -> None:
        """Note what was written to the piece, and so to its aliases; `coming`: the number of writes
        that torch has yet to count."""
        history = self.history
        history.text, history.numbers = text, numbers
        history.version = _version_of(self) + coming
        if history.opened is not None:
            history.opened = content_word(self._local)
        # For those who hold the local tensor: operators in here don't count for it
        if not self._local.is_inference():
            increment_version(self._local)

    @property
    def text(self) -> str:
        """How it was made, in words. See Note [words]."""
        self.note_foreign_writes()
        return self.history.text

    @property
    def word(self) -> int:
        """A checksum of these words."""
        return crc32(self.text.encode())

    def filled_with(self, local: Tensor, text: str, numbers: tuple[Tensor, ...] = ()) -> Piece:
        """A piece of another leaf, at this one's place, which was made as the text says."""
        return Piece(local, self.extent, is_whole=self.is_whole, history=History(text, numbers))

    def reshaped(self, shape: Sequence[int]) -> Piece:
        """An alias, in another shape of as many elements."""
        extent = replace(self.extent, shape=(*shape,))
        return Piece(self.here, extent, is_whole=self.is_whole, history=self.history)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.is_used_up:
            return "Piece(donated to a step)"
        if self.is_whole:
            return f"Piece({self.here!r}, the whole leaf)"
        return f"Piece({self.here!r}, {_told(self.extent)})"

    def __format__(self, spec: str) -> str:
        return format(self.here, spec) if self.is_whole else format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        form: Any = {"is_whole": self.is_whole, "requires_grad": self.requires_grad}
        made = partial(Piece, history=History(self.text), **form)
        return made, (self.here, self.extent)

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        made: Any = self.detach().clone()
        made.requires_grad_(self.requires_grad)
        return made  # type: ignore[no-any-return]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> NoReturn:
        refuse("Tensor.data is assigned to", self, _WRITE)

    numpy = _reading("numpy")
    tolist = _reading("tolist")
    __array__ = _reading("__array__")
    __dlpack__ = _reading("__dlpack__")
    data_ptr = _reading("data_ptr")
    untyped_storage = _reading("untyped_storage")
    storage_offset = _reading("storage_offset")


# Otherwise dynamo would trace its Python, with warnings, when a compiled function is given pieces
run_untraced(Piece.__torch_dispatch__.__func__)  # type: ignore[attr-defined]


class _Call:
    """One operator, and what it is given.

    Attributes:
        words: of the operands that `local` was asked for.
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind, self.written = kind_of(func), written_of(func, args, kwargs)
        self.pieces = [*_pieces_among(*args, *kwargs.values())]
        self.words: list[str] = []
        self._numbers: list[Tensor] = []  # on a device, of which no host knows the values

    @cached_property
    def first(self) -> Piece:
        """The first piece that is a part; else the first one."""
        return min(self.pieces, key=lambda piece: piece.is_whole)

    @property
    def shape_alike(self) -> Sequence[int] | None:
        """The shape of a view in which every element keeps its place; None: it is no such view."""
        if self.func not in (torch.ops.aten.view.default, torch.ops.aten.expand.default):
            return None
        shape, asked = self.first.shape, self.args[1]
        is_same = len(asked) == len(shape)
        if is_same and all(size in (-1, here) for size, here in zip(asked, shape, strict=True)):
            return shape
        # As (1,), whose dtypes are promoted as those of other leaves are
        is_one = self.func is torch.ops.aten.view.default and self.first.numel() == 1
        return [1] * len(asked) if is_one else None

    def check(self) -> None:
        """Raise unless parts may be given to this operator."""
        if self.kind.is_random:
            refuse(f"{self.func} draws other numbers on each rank", self.first, _DRAW)
        if self.kind.reads_values:
            refuse(f"{self.func} reads their values", self.first, _ASK)
        if not self.kind.is_pointwise:
            refuse(f"{self.func} is not elementwise", self.first, _ASK)
        if any(type(x) is not Piece for x in tensors_among(*self.written)):
            refuse(f"{self.func} writes them to another tensor", self.first, _ELEMENTWISE)
        self.check_written()

    def check_written(self) -> None:
        """Raise if a leaf of the program's value is written to, or a copy, where it is lost."""
        for piece in _pieces_among(*self.written):
            if piece.history.is_brought:
                raise StructureError(
                    f"{self.func} has written to a copy of a leaf, which lies in a place"
                    f"{users_line()}",
                    got=piece.history.text,
                    remedy=_WRITE,
                )
            if piece.history.path is not None:
                raise StructureError(
                    "a program has written to its value in place, and the state that it was "
                    f"given would change: by {self.func}{users_line()}",
                    path=piece.history.path,
                    expected="new tensors: a step is a pure function",
                    got="a write to the value's own",
                    remedy=_WRITE,
                )

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """Those of the result, each once. Many are one, of which the device makes them: else they
        would become more with each operator."""
        once = _distinct(self._numbers)
        if len(once) <= _MANY:
            return once
        weighted = [n * number_on(once[0].device, x) for n, x in enumerate(once, 1)]
        return (torch.stack(weighted).sum(),)

    def local(self, operand: Any) -> Any:
        """The operand on this rank; its word is noted."""
        if isinstance(operand, Piece):
            self._check_alike(operand)
            self.words.append(_operand_in_words(operand))
            self._numbers += operand.history.numbers
            return _as_operand(operand)
        if isinstance(operand, Tensor):
            is_one = operand.numel() == 1 and operand.dim() <= self.first.dim()
            if not is_one:
                same = operand.shape == self.first.shape
                refuse(
                    f"{self.func} combines them with a tensor of shape {tuple(operand.shape)}",
                    self.first,
                    _FORMS if same else "",
                )
            # A number of a device would make its host wait
            if _is_readable(operand):
                self.words.append(repr(operand.item()))
            else:
                self.words.append(str(operand.dtype))
                self._numbers.append(operand)
            # Parts are 1-D
            return operand if operand.dim() == 0 or self.first.is_whole else operand.reshape(1)
        if isinstance(operand, list | tuple):
            return [self.local(x) for x in operand]
        # Ranks have devices of other numbers
        self.words.append(operand.type if isinstance(operand, torch.device) else repr(operand))
        return operand

    def _check_alike(self, piece: Piece) -> None:
        extent = self.first.extent
        if piece.is_whole and not self.first.is_whole:
            refuse(f"{self.func} combines them with whole leaves", self.first, _FORMS)
        if piece.extent is not extent and piece.extent != extent:
            refuse(f"{self.func} combines them with pieces of another leaf", self.first)


def _operand_in_words(piece: Piece) -> str:
    """A piece in the words of what is made of it. Long ones would grow with each operator."""
    text = piece.text
    # Python's own hash of a text differs between processes
    return text if len(text) <= _LONG else f"#{piece.word:08x}"


def _as_operand(piece: Piece) -> Tensor:
    """The piece's values for an operator. Of a 0-d leaf they are 0-d, as dtypes are promoted by
    it; a rank that holds nothing of one computes with something, and drops the result."""
    if piece.extent.shape or piece.is_whole:
        return piece.here
    # An integer may be divided by a one
    return piece.here.view(()) if piece.here.numel() else piece.here.new_ones(())


def _as_local(made: Tensor, extent: Extent, *, is_whole: bool) -> Tensor:
    """The inverse, of an operator's result."""
    return made if extent.shape or is_whole else made.reshape(1)[: extent.num_here]


def _run(call: _Call) -> Any:
    """A pointwise operator on pieces of one leaf."""
    args = [call.local(x) for x in call.args]
    kwargs = {name: call.local(x) for name, x in call.kwargs.items()}
    made = call.func(*args, **kwargs)
    text = f"{call.kind.name}({', '.join(call.words)})"
    if call.written:
        return _written(call, text)
    if isinstance(made, Tensor):
        return _made(call, made, text)
    # An operator with several results
    return tuple(_made(call, x, f"{text}[{n}]") for n, x in enumerate(made))


def _made(call: _Call, made: Tensor, text: str) -> Piece:
    """The result of an operator on pieces of one leaf."""
    of = call.first
    # The same tensor, which knows the flat that it lies in
    if call.kind.makes_alias:
        return Piece(of.here, of.extent, is_whole=of.is_whole, history=of.history)
    # Overloads of one name are of both kinds, as `max` is
    if made.shape != _as_operand(of).shape:
        refuse(f"{call.func} is not elementwise", of, _ASK)
    local = _as_local(made.resolve_conj().resolve_neg(), of.extent, is_whole=of.is_whole)
    return of.filled_with(local, text, call.numbers)


def _written(call: _Call, text: str) -> Any:
    """The pieces that an operator has written to: made anew, in the words of their aliases, too."""
    for piece in _pieces_among(*call.written):
        piece.note_write(text, call.numbers, coming=0 if piece.is_inference() else 1)
    return _one_or_all(call.written)


def _one_or_all(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _run_on_foreach(call: _Call) -> Any:
    """A foreach operator of pointwise ones, on lists of pieces: one leaf after the other, each of
    which is checked, and has words of its own."""
    size = next(len(x) for x in call.args if isinstance(x, list | tuple))
    made: list[Piece] = []

    def nth(x: Any, n: int) -> Any:
        return [x[n]] if isinstance(x, list | tuple) and len(x) == size else x

    for n in range(size):
        kwargs = {name: nth(x, n) for name, x in call.kwargs.items()}
        own = _Call(call.func, [nth(x, n) for x in call.args], kwargs)
        if not own.pieces:
            refuse(f"{call.func} combines them with other tensors", call.first)
        made += _run(own)
    return None if call.written else made


def _run_on_whole(call: _Call) -> Any:
    """Any operator, on leaves that every rank holds whole."""
    if call.kind.moves:
        refuse(f"{call.func} moves them", call.first, "`p.t()`, say, instead of `p.t_()`")
    call.check_written()
    extents = {piece.extent for piece in call.pieces}
    plain = [x for x in tensors_among(*call.args, *call.kwargs.values()) if type(x) is not Piece]
    is_alike = len(extents) == 1 and all(x.dim() == 0 for x in plain)
    if call.kind.is_pointwise and not call.kind.is_foreach and is_alike:
        return _run(call)
    args = [_without_pieces(x) for x in call.args]
    kwargs = {name: _without_pieces(x) for name, x in call.kwargs.items()}
    made = call.func(*args, **kwargs)
    # What is written to stays itself, and its word follows from its values
    for piece in _pieces_among(*call.written):
        piece.note_write(content_word(piece._local))
    return made if made is None or not call.written else _one_or_all(call.written)


def _without_pieces(operand: Any) -> Any:
    if isinstance(operand, Piece):
        return operand.here
    if isinstance(operand, list | tuple):
        return [_without_pieces(x) for x in operand]
    return operand


def _pieces_among(*values: Any) -> Iterator[Piece]:
    for x in tensors_among(*values):
        if isinstance(x, Piece):
            yield x


def _version_of(piece: Piece) -> int:
    """It changes with each write in place; tensors of inference mode have none."""
    return 0 if piece.is_inference() else version_of(piece)


def _is_readable(x: Tensor) -> bool:
    """Whether the host may read the values, without a wait for a device."""
    return x.is_cpu and has_values(x)


def _distinct(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each object once."""
    return tuple({id(x): x for x in tensors}.values())


def leases_of(leaves: Sequence[Any]) -> list[Lease]:
    """Those of the nodes that have cut these leaves, each once."""
    found = [leaf.history.lease for leaf in leaves if isinstance(leaf, Piece)]
    return [*{id(lease): lease for lease in found if lease is not None}.values()]


def home_of(leaves: Sequence[Any]) -> Home | None:
    """The flat that just these leaves are cut from; None: they are from elsewhere."""
    pieces = [leaf for leaf in leaves if isinstance(leaf, Piece)]
    home = pieces[0].history.lease if pieces else None
    if isinstance(home, Home) and home.is_of([piece.as_cut for piece in pieces]):
        return home
    return None


class AsMade(NamedTuple):
    """The leaves that the library has made, as somebody first reads them."""

    origin: str  # see `OnEngine`
    leaves: list[Any]
    versions: list[int]  # of leaves that are plain tensors

    @classmethod
    def of(cls, origin: str, leaves: list[Any]) -> AsMade:
        return cls(origin, leaves, [*map(_plain_version, leaves)])

    def still(self, leaves: Sequence[Any], names: Sequence[str]) -> bool:
        """Whether these are the leaves of these names, to which nobody has written."""
        rows = zip(names, self.leaves, self.versions, leaves, strict=False)
        return len(leaves) == len(self.leaves) and all(self._is_still(*row) for row in rows)

    def _is_still(self, name: str, made: Any, version: int, leaf: Any) -> bool:
        if isinstance(leaf, Piece):
            return leaf.text == text_from(self.origin, name)
        return leaf is made and _plain_version(leaf) == version


def _plain_version(leaf: Any) -> int:
    is_counted = isinstance(leaf, Tensor) and type(leaf) is not Piece and not leaf.is_inference()
    return version_of(leaf) if is_counted else 0


def story_of(leaves: Sequence[Any], holding: Any, made: AsMade | None = None) -> Story:
    """How a tree's leaves were made, which need not be pieces.

    Args:
        holding: of their node.
        made: the leaves at first; None: the library hasn't made them. As long as they are the same,
            it makes no difference whether a rank has read them.
    """
    if made is not None and made.still(leaves, holding.paths):
        return story_from(made.origin, holding)
    words: list[int] = []
    texts: list[str] = []
    unread: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Piece):
            words.append(leaf.word)
            texts.append(leaf.history.text)
            unread += leaf.history.numbers
            continue
        text = content_word(leaf)
        words.append(crc32(text.encode()))
        texts.append(text)
        if isinstance(leaf, Tensor) and not _is_readable(leaf):
            unread.append(leaf)
    origin = f"#{crc32(repr(words).encode()):08x}"
    return Story(origin, _distinct(unread), lambda: _told_by_leaf(texts, holding))


def story_from(origin: str, holding: Any) -> Story:
    """How the leaves of a node with this holding were made, which the library has made there."""

    def tell() -> dict[str, str]:
        return _told_by_leaf([text_from(origin, path) for path in holding.paths], holding)

    return Story(origin, (), tell)


def _told_by_leaf(texts: Sequence[str], holding: Any) -> dict[str, str]:
    """How a node's leaves were made, by path. Pieces come first: a rank that has changed one tells
    a count by its value, where the others tell how it was made, and it may be the same."""
    # Somebody's own tree in a state's place may have another number of leaves
    rows = [*zip(holding.parts, holding.paths, texts, strict=False)]
    rows.sort(key=lambda row: row[0] is None)
    return {path or "(root)": text for _, path, text in rows}


def text_from(origin: str, name: str) -> str:
    """How a leaf was made that the library has made there, in words."""
    return dotted(origin, name) or "a leaf"


def content_word(leaf: Any, *, look: bool = False) -> str:
    """The word of a leaf of which nobody knows how it was made, and which every rank holds whole:
    of its values. On a device they are read to `look` alone, and else the word is of its form."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    if not (_is_readable(leaf) or (look and has_values(leaf))):
        return form_in_words(leaf)
    if leaf.dim() == 0 and leaf.layout == torch.strided:
        return repr(leaf.item())
    return content_digest(leaf)


def form_in_words(leaf: Tensor) -> str:
    """The word of a tensor whose values aren't read."""
    return f"a {leaf.dtype} of shape {(*leaf.shape,)}"


def refuse(story: str, piece: Piece, remedy: str = "") -> NoReturn:
    """Raise the error of pieces that are used as if they were whole."""
    raise StructureError(
        f"pieces of leaves are used as if they were whole: {story}{users_line()}",
        expected="elementwise functions of the leaves of trees that are cut alike",
        got=f"{_told(piece.extent)}, {piece.history.text}",
        remedy=remedy or _ELEMENTWISE,
    )


def _told(extent: Extent) -> str:
    return f"elements {extent.start} to {extent.stop} of a leaf of shape {extent.shape}"


_ASK = (
    "fz.dot(a, b) for sums over a tree; a loss of fz.value_and_grad, which is passed the tree, or "
    "a transform that says what it needs, for all else; whole = fz.unshard(tree) makes whole leaves"
)
_DRAW = "fz.random.normal(tree), uniform or rademacher"
_WRITE = (
    "`p * 0.5` instead of `p.mul_(0.5)`, also in tree_map; tree_map(torch.clone, tree) first for a "
    "copy to write to"
)
_FORMS = (
    "fz.apply_updates(params, updates) adds pieces to params that are held whole, and "
    "fz.pieces(params) gives params in pieces; whole = fz.unshard(tree) makes whole leaves"
)
_ELEMENTWISE = (
    "make tensors by tree_map of the same tree, torch.zeros_like for one; or compute with whole "
    "leaves, fz.unshard(tree)"
)
