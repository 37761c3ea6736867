"""`PieceWatch`: refuses functions of pieces that give other numbers than those of whole leaves.

A program computes with the leaves of sharded trees by `tree_map`. On ranks many of them are pieces,
1-D and a part of their leaf. Elementwise functions of pieces of the same extent are those of whole
leaves. All others, such as a sum, are of this rank's part alone, and nothing would tell.

Note [operations]: an elementwise function may still be this rank's own: by a factor that it has
made of its part of the batch, or in a branch that it alone takes. So the watch writes down each
operation on a piece, with its numbers, and ranks compare them as they compare the step's results.
A number reaches calls of the library in other ways, too: as an optimizer's rate, as a seed, in
buffers, in leaves that every rank holds whole. So all is written down of a call that ranks must
have alike: digests of leaves that the program has made, say. A branch may also do no more than
choose a tree: the old params, where a batch looks bad. So pieces and trees have names, by the
operation or the library's call that has made them, and the watch writes down the trees that each
call is given, and those of the next value.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple, NoReturn, TypeVar

import optree
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..._torch_private import PYTREE_FILE, storage_id, version_of
from ...errors import StructureError, explain
from ...layout.extent import Extent
from ...layout.levels import level_of
from ...layout.sharded_tree import ShardedTree, reading_leaves, telling_uses
from ...optim.base import Transform
from ...optim.claims import operators
from ...optim.claims.operators import HOST_READS, kind_of, tensors_among, watching
from ...params import is_on_engine
from ...sharded_optim.sharded_state import ShardedOptState
from ...step.program import LossCall
from ...step.rng import telling_draws
from ...tree import paths
from ..readable import told_values
from .reach import PACKAGE, reachable_tensors

Function = TypeVar("Function", bound=Callable[..., Any])

# Their frames are nobody's: functions of the user's are called from there
_BETWEEN = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, optree))
# Those that call a function of torch's for the user, who has passed it to `tree_map`
_MAPPING = (os.path.dirname(optree.__file__) + os.sep, PYTREE_FILE)

# Files whose frames are of the watch itself, or torch's way from a tensor's method to it
_WATCHING = {
    __file__,
    operators.__file__,
    torch.overrides.__file__,
    Tensor.__len__.__code__.co_filename,
}
# Ways to the place and the extents of elements that run no operator
_SHAPE_READS = (
    Tensor.dim,
    Tensor.ndimension,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.__len__,
    Tensor.numel,
    Tensor.nelement,
    torch.numel,
    Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    Tensor.stride,
    Tensor.dim_order,
    Tensor.storage_offset,
    Tensor.storage,
    Tensor.untyped_storage,
)
# Views that leave each element in its place, if the shape stays; a transposed piece is no piece
_VIEWS_OF_ALL = {"_conj", "_neg_view", "alias", "detach", "expand", "view"}

# The watch of the program that runs in this thread, outside of the library's calls
_WATCH: ContextVar[PieceWatch | None] = ContextVar("_WATCH", default=None)


@contextmanager
def unwatched() -> Iterator[None]:
    """Let everything pass inside: a loss, or an optimizer, which have checks of their own."""
    watch = _WATCH.get()
    if watch is not None:
        watch.stop()
    try:
        with reading_leaves(None):
            yield
    finally:
        if watch is not None:
            watch.start()


def noted(function: Function) -> Function:
    """Let the watch write down the calls of a method, and name the trees that it makes. See Note
    [operations]."""

    @wraps(function)
    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _WATCH.get()
        if watch is None:
            return function(engine, *args, **kwargs)
        call = watch.note_call(function.__name__, args, engine.description_of)
        made = function(engine, *args, **kwargs)
        watch.name_made(made, call)
        return made

    return run  # type: ignore[return-value]


def check_leaves_of_loss(call: LossCall) -> None:
    """Raise if a loss can reach a leaf that is a piece, where the watch knows of it."""
    watch = _WATCH.get()
    if watch is not None:
        watch.check_loss(call)


class _Operation(NamedTuple):
    """An operator on pieces, or a call of the library. See Note [operations]."""

    func: Any
    operands: list[Any]
    line: str = ""
    # Of a call what it was given beside trees, by name: plain data, or a function that makes it
    given: Mapping[str, Any] = {}

    def told(self, number: int) -> dict[str, Any]:
        """Plain data by name, the same on all ranks. Waits for numbers that are on a device."""
        operands = ", ".join(map(_told, self.operands))
        found = {f"operation {number}": f"{self.func}({operands}){self.line}"}
        for key, it in self.given.items():
            found[f"in operation {number} ({self.func}), {key}"] = it() if callable(it) else it
        return found


class _Piece(NamedTuple):
    """A piece in words that are the same on all ranks."""

    name: str


class PieceWatch:
    """Watches the operators of one call of a program, on this rank.

    Args:
        rank: for errors.
        of: whose call it is, in words, for errors.
        remedy: for errors; None: that of a program.
        by_library: whether the library's functions are watched, too. In a program they work on
            sharded trees, and know them.
    """

    def __init__(
        self,
        rank: int,
        *,
        of: str = "a program",
        remedy: str | None = None,
        by_library: bool = False,
    ):
        self.rank = rank
        self._of, self._remedy, self._by_library = of, remedy, by_library
        self._operations: list[_Operation] = []
        # Leaves that are pieces, and what elementwise operators have made of them
        self._extents = WeakIdKeyDictionary()
        self._whole = WeakIdKeyDictionary()  # a set of leaves that every rank holds
        # The versions of those that ranks have alike: by the library, or by a comparison
        self._alike = WeakIdKeyDictionary()
        self._read = WeakIdKeyDictionary()  # a set of the trees and states that somebody has read
        # Of trees and states that the library has made; of leaves, and of what was made of them
        self._names = WeakIdKeyDictionary()
        self._stack = ExitStack()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the program that runs inside."""
        # Not in `start`: others read leaves inside of this, and a pause would end theirs
        with reading_leaves(self.note_read):
            self.start()
            try:
                yield
            finally:
                self.stop()

    def start(self) -> None:
        """Begin, or go on."""
        token = _WATCH.set(self)
        self._stack.callback(_WATCH.reset, token)
        self._stack.enter_context(telling_draws(self.note_draw))
        self._stack.enter_context(watching(self))

    def stop(self) -> None:
        """End, or pause. Operators are not slowed down then, and units may be compiled."""
        self._stack.close()

    def note_read(
        self, node: ShardedTree | ShardedOptState, leaves: Sequence[Tensor | None]
    ) -> None:
        """Remember the extents of the leaves of a tree, or of a state, which somebody reads."""
        name, known = self._names.get(node, "a tree"), _leaf_names(node)
        # Later the program may have put in leaves of its own
        is_librarys = node in self._names and node not in self._read
        self._read[node] = True
        for path, leaf, extent in zip(known, leaves, extents_of(node), strict=True):
            if not isinstance(leaf, Tensor):
                continue
            self._names.setdefault(leaf, f"{path or 'the leaf'} of {name}")
            if extent is not None:
                self._extents[leaf] = extent
                continue
            self._whole[leaf] = True
            if is_librarys:
                self._alike.setdefault(leaf, _version(leaf))

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operator, or refuse it."""
        if not (self._extents or self._whole) or not (self._by_library or _is_users()):
            return func(*args, **kwargs)
        given = [*tensors_among(*args, *kwargs.values())]
        for x in given:
            self._note_alias(x)
        pieces = [x for x in given if x in self._extents]
        if not pieces:
            return func(*args, **kwargs)
        kind, extent = kind_of(func), self._extents[pieces[0]]
        if kind.random:
            self._refuse(f"{func} draws other numbers on each rank", extent, _DRAW)
        if kind.reads_values:
            self._refuse(f"{func} reads their values", extent, _ASK)
        moves = func.is_view and func.overloadpacket.__name__ not in _VIEWS_OF_ALL
        if moves or not kind.elementwise:
            self._refuse(f"{func} is not elementwise", extent, _ASK)
        for x in given:
            other = self._extents.get(x)
            if other is None and x.dim() > 0:
                remedy = _FORMS if (*x.shape,) == (*extent.shape,) else ""
                self._refuse(
                    f"{func} combines them with a tensor of shape {(*x.shape,)}", extent, remedy
                )
            if other not in (None, extent):
                self._refuse(f"{func} combines them with pieces of another leaf", extent)
        operands = [self._noted(x) for x in (*args, *kwargs.values())]
        self._operations.append(_Operation(func, operands, _users_line()))
        shape = pieces[0].shape
        made = func(*args, **kwargs)
        for x in tensors_among(made):
            if x.shape != shape:
                self._refuse(f"{func} makes shape {(*x.shape,)} of {(*shape,)}", extent)
            self._extents[x] = extent
            self._names[x] = f"the result of operation {len(self._operations)}"
        return made

    def note_call(
        self, name: str, args: Sequence[Any], description_of: Callable[[Transform], Any]
    ) -> str:
        """Write down a call of the library, with what it is given. Returns its name."""
        operands: list[Any] = []
        given: dict[str, Any] = {}
        trees: list[Any] = []
        for arg in args:
            if isinstance(arg, Transform):
                given["optimizer"] = partial(description_of, arg)
            elif isinstance(arg, LossCall):
                operands += self._names_of(arg.args).values()
                trees.append(arg.args)
                for path, words in told_values(arg.buffers).items():
                    given[f"buffer {path!r}"] = words
            else:
                operands += self._names_of(arg).values()
                trees.append(arg)
        given |= self.own_whole_leaves(trees)
        self._operations.append(_Operation(name, operands, given=given))
        return f"operation {len(self._operations)} ({name})"

    def note_draw(self, kind: str, seed: int, step: int) -> None:
        """Write down a draw of random numbers by a seed of the program's own."""
        self._operations.append(_Operation(f"fz.random.{kind}", [f"seed {seed}", f"step {step}"]))

    def name(self, tree: Any, whose: str) -> None:
        """Name the sharded trees and states in a tree by their paths: all ranks have made them
        alike."""
        for path, node in _nodes_of(tree).items():
            self._names.setdefault(node, f"{whose}.{path}".rstrip("."))

    def name_made(self, made: Any, call: str) -> None:
        """The same of those that a call of the library has made, which has this name."""
        nodes = _nodes_of(made)
        kinds = Counter(map(_kind_of_node, nodes.values()))
        for path, node in nodes.items():
            kind = _kind_of_node(node)
            # Of several trees, such as gradients of two networks
            which = kind if kinds[kind] == 1 else f"{kind} {path}"
            self._names.setdefault(node, f"{which} of {call}")

    def _names_of(self, tree: Any) -> dict[str, str]:
        """The names of the sharded trees and states in a tree, by path. One that the program has
        made by `tree_map` has those of its leaves."""
        told = {}
        for path, node in _nodes_of(tree).items():
            if node not in self._names:
                # No read of the program's
                with reading_leaves(None), telling_uses(None):
                    leaves = optree.tree_leaves(node.tree)
                tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                told[path] = f"[{', '.join(self._names.get(x, 'a leaf') for x in tensors)}]"
            else:
                told[path] = self._names[node]
        return told

    def own_whole_leaves(self, trees: Any) -> dict[str, str]:
        """Of trees and states that a call is given, or a step returns, the leaves that every rank
        holds whole and that the program has made, or written to, by name. They may be this rank's
        own."""
        own: dict[str, Any] = {}
        for n, node in enumerate(_nodes_of(trees).values(), 1):
            if node in self._names and node not in self._read:
                continue
            # The tree from which `tree_map` has made it, or its first one
            name = node.holding.name if isinstance(node, ShardedTree) else ""
            origin = f", made of {name!r}" if name else ""
            for path, leaf in whole_leaves(node).items():
                if isinstance(leaf, Tensor) and self._alike.get(leaf, -1) != _version(leaf):
                    own[f"leaf {path!r} of tree {n}{origin}"] = leaf
                    self._alike[leaf] = _version(leaf)
        return told_values(own)

    def see_function(self, func: Any, x: Tensor) -> None:
        """Refuse to hand values to Python or numpy, and to tell a piece's own shape."""
        if func in HOST_READS and _is_users():
            story, remedy = f"Tensor.{func.__name__} reads their values", _ASK
        elif func in _SHAPE_READS and _is_called_by_user():
            story, remedy = f"{_read_by(func)} is of this rank's part", _SHAPES
        else:
            return
        self._note_alias(x)
        if x in self._extents:
            self._refuse(story, self._extents[x], remedy)

    def _note_alias(self, x: Tensor) -> None:
        """Remember a tensor that is a piece under another name: torch makes some without an
        operator, such as `nn.Parameter(piece)`."""
        if x in self._extents or x in self._whole or not x.dim() or x.layout != torch.strided:
            return
        place = storage_id(x), x.storage_offset()
        for piece, extent in [*self._extents.items()]:
            if (storage_id(piece), piece.storage_offset()) == place:
                self._extents[x] = extent
                self._names[x] = self._names[piece]
                return

    def check_loss(self, call: LossCall) -> None:
        """Refuse a loss that can reach a piece: it would compute with this rank's part. Operators
        inside of a loss aren't watched, since its units may be compiled."""
        places = {_place(piece): extent for piece, extent in self._extents.items()}
        given = {"args": call.args, "batch": call.batch, "buffers": call.buffers}
        for label, x, _ in reachable_tensors(call.loss, given):
            if x in self._whole:
                continue
            # Also under another name; all empty tensors lie in one place
            extent = self._extents.get(x, places.get(_place(x)) if x.numel() else None)
            if extent is not None:
                name = getattr(call.loss, "__qualname__", type(call.loss).__name__)
                raise StructureError(
                    explain(
                        f"the loss {name} uses a single leaf of a sharded tree, or what was made "
                        "of one, which is this rank's part there",
                        path=label,
                        expected="trees",
                        got=f"elements {extent.start} to {extent.stop} of a leaf of shape "
                        f"{extent.shape}",
                        rank=self.rank,
                        remedy=_PASS_TREES,
                    )
                )

    def operations(self, value: Any) -> dict[str, Any]:
        """Those on pieces so far, and the trees of the next value: plain data by name, the same on
        all ranks. Waits for numbers that are on a device."""
        told: dict[str, Any] = {}
        for number, operation in enumerate(self._operations, 1):
            told |= operation.told(number)
        for path, name in self._names_of(value).items():
            told[f"the next value's tree {path!r}"] = name
        return told

    def _noted(self, operand: Any) -> Any:
        """An operator's operand, to be told later; of a piece its extent."""
        if isinstance(operand, list | tuple):
            return [self._noted(x) for x in operand]
        if not isinstance(operand, Tensor):
            return operand
        if operand in self._extents:
            return _Piece(self._names[operand])
        # What isn't a piece is a number, which the program may change
        return operand.detach().clone()

    def _refuse(self, story: str, extent: Extent, remedy: str = "") -> NoReturn:
        raise StructureError(
            explain(
                f"{self._of} uses pieces of leaves as if they were whole: {story}{_users_line()}",
                expected="elementwise functions of the leaves of trees that are cut alike",
                got=f"elements {extent.start} to {extent.stop} of a leaf of shape {extent.shape}",
                rank=self.rank,
                remedy=self._remedy or remedy or _ELEMENTWISE,
            )
        )


_PASS_TREES = (
    "pass the tree of params, value_and_grad(loss)(params, tree), and read the leaf of it in the "
    "loss; of gradients, updates and results of tree_map pass the whole tree, fz.unshard(tree)"
)
_ASK = (
    "fz.dot(a, b) for sums over a tree; a loss of fz.value_and_grad, or a transform that says what "
    "it needs, for all else; whole = fz.unshard(tree) makes whole leaves"
)
_SHAPES = (
    "read shapes of whole params before the step, by path, and use optree.tree_map_with_path; "
    "optim.masked for an optimizer of some leaves; fz.dot(ones, ones), ones made by "
    "torch.ones_like, for a number of elements"
)
_DRAW = "fz.random.normal(tree), uniform or rademacher"
_FORMS = (
    "fz.apply_updates(params, updates) adds pieces to params that are held whole, and "
    "fz.pieces(params) gives params in pieces; whole = fz.unshard(tree) makes whole leaves"
)
_ELEMENTWISE = (
    "make tensors by tree_map of the same tree, torch.zeros_like for one; or compute with whole "
    "leaves, fz.unshard(tree)"
)


def extents_of(node: ShardedTree | ShardedOptState) -> Sequence[Extent | None]:
    """Per leaf, its extent; None: every rank holds it whole, in its own shape."""
    if isinstance(node, ShardedOptState):
        return node.holding.extents()
    if node.holding.form == "pieces":
        return node.holding.extents()
    layout = node.sharding.layout
    found: list[Extent | None] = []
    for (b, _), extent in zip(layout.places, node.holding.extents(), strict=True):
        found.append(extent if level_of(layout.buckets[b]).cuts_params else None)
    return found


def _place(x: Tensor) -> Any:
    """The place of a strided tensor's elements, which another tensor object may share; of others
    None."""
    if x.layout != torch.strided:
        return None
    return storage_id(x), x.storage_offset(), x.shape


def whole_leaves(node: ShardedTree | ShardedOptState) -> dict[str, Any]:
    """By path, the leaves of a tree or state that every rank holds whole."""
    # No read of the program's
    with reading_leaves(None), telling_uses(None):
        tree = node.tree
    extents = extents_of(node)
    if all(extents):
        return {}
    # Where they are not as many, the call that is given the node refuses it
    rows = zip(paths(tree), optree.tree_leaves(tree), extents, strict=False)
    return {path: leaf for path, leaf, extent in rows if extent is None}


def _users_frame() -> Any:
    """The innermost frame outside of torch and optree, from the operator outwards."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _WATCHING and not file.startswith((*_BETWEEN, "<frozen")):
            return frame
        frame = frame.f_back
    return None


def _is_users() -> bool:
    """Whether an operator is called by the user's code, not by this library's."""
    frame = _users_frame()
    return frame is None or not frame.f_code.co_filename.startswith(PACKAGE)


def _told(noted: Any) -> str:
    """A noted operand in words that are the same on all ranks."""
    if isinstance(noted, list):
        return f"[{', '.join(map(_told, noted))}]"
    if isinstance(noted, _Piece):
        return noted.name
    if isinstance(noted, str):
        return noted
    if isinstance(noted, torch.device):
        return noted.type
    return repr(noted.item() if isinstance(noted, Tensor) else noted)


def _nodes_of(tree: Any) -> dict[str, Any]:
    """The sharded trees and states in a tree, by path."""
    nodes = optree.tree_leaves(tree, is_leaf=is_on_engine)
    rows = zip(paths(tree, is_on_engine), nodes, strict=True)
    return {path: node for path, node in rows if is_on_engine(node)}


def _kind_of_node(node: ShardedTree | ShardedOptState) -> str:
    if isinstance(node, ShardedOptState):
        return "the optimizer's state"
    return "the params" if node.holding.form == "held" else "the pieces"


def _leaf_names(node: ShardedTree | ShardedOptState) -> list[str]:
    """The paths of a tree's leaves, or a state's."""
    if isinstance(node, ShardedTree):
        return [leaf.path for leaf in node.sharding.layout.leaves]
    # No read of the program's
    with reading_leaves(None), telling_uses(None):
        return paths(node.tree)


def _version(leaf: Tensor) -> int | None:
    """It changes with each write in place; tensors of inference mode have none."""
    return None if leaf.is_inference() else version_of(leaf)


def _is_called_by_user() -> bool:
    """Whether the user's code itself calls a function; torch's Python code asks for shapes, too."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename.startswith((*_WATCHING, *_MAPPING)):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith((*_BETWEEN, PACKAGE))


def _read_by(func: Any) -> str:
    """A function's name for errors; an attribute's, where it reads one."""
    attribute = getattr(func, "__self__", None)
    return f"Tensor.{getattr(attribute, '__name__', func.__name__)}"


def _users_line() -> str:
    frame = _users_frame()
    if frame is None:
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
