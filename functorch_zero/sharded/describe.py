"""`describe`: a rank's part of a state, unit by unit: dtypes, traffic, bytes, and the share of the
whole that is here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from ..compress import Form
from ..errors import StructureError
from ..groups.mesh import axes_of
from ..groups.single import SingleRank
from ..layout.levels import Levels
from ..layout.sharded_tree import Holding, ShardedTree
from ..params import is_on_engine, nodes_of
from ..precision import short
from ..sharded_optim.sharded_state import ShardedOptState, StateHolding
from ..sharded_optim.state_plan import StateLeaf, plan_state
from ..step.program_step import ProgramStep
from ..step.state import State, check_state, marked
from ..step.train import TrainStep
from ..tree import dotted, grouped, named_leaves, paths
from .drawing import Bar, align, table_html
from .notes import bytes_held, found_units, notes_of, wire_of
from .options import Options, Places
from .placed import StatePlaces, Stored, stored_flats, stored_tensors
from .program.step import ShardedStep


class Row(NamedTuple):
    """The leaves of one bucket, or tensors that belong to no leaf."""

    unit: str
    leaves: tuple[str, ...]  # their paths
    elements: int  # of whole leaves
    storage: tuple[torch.dtype, ...]  # of the params, or of the tensors
    compute: torch.dtype | None  # the dtype that whole leaves are used in; None: no loss uses them
    wire: tuple[tuple[str, Form], ...]  # messages of a step, and their dtypes or codecs
    # The leaves, between steps: "whole", "1/4" for a piece of four, or "1/4, whole as bfloat16"
    where: str
    nbytes: int  # of params here, padding included
    state: tuple[torch.dtype, ...] = ()  # dtypes of the optimizer's state of these leaves
    state_where: str = ""  # "whole", "1/4", "at owners", or ""
    state_nbytes: int = 0  # of the optimizer's state here


class Description(NamedTuple):
    """The holdings of one rank. It prints as a table; a notebook shows bars."""

    rows: tuple[Row, ...]
    rank: int
    num_ranks: int
    optimizer: str  # as it prints
    # The objects that `shard` was given for seams, as they print, and its `reduce_bucket`
    seams: str = ""
    mesh: str = ""  # the sizes of its axes, and the one of the same data
    # State and params that lie in places. Gradients and saved tensors follow from the loss, which
    # a plan runs.
    stored: tuple[Stored, ...] = ()
    # The units that `functionalize` found where none were chosen, and why: a line per kind
    found: tuple[str, ...] = ()

    @property
    def params_nbytes(self) -> int:
        """Bytes of the params on this rank, padding included."""
        return sum(row.nbytes for row in self.rows)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimizer's state on this rank."""
        return sum(row.state_nbytes for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of params and state on this rank."""
        return self.params_nbytes + self.state_nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about sparse gradients, and about a unit of more than half of the parameters."""
        elements: Counter[str] = Counter()
        for row in self.rows:
            if row.leaves:
                elements[row.unit] += row.elements
        tables = {row.unit for row in self.rows for message, _ in row.wire if message == "rows"}
        return notes_of(elements, self.num_ranks, tables)

    def __repr__(self) -> str:
        # At a prompt and in a notebook, too
        return str(self)

    def __str__(self) -> str:
        lines = align([_HEAD, *map(_cells, self.rows)], right=_NUMBERS)
        with_seams = f"; {self.seams}" if self.seams else ""
        lines.append(f"{self._total}; {self.optimizer}{with_seams}")
        if self.mesh:
            lines.append(f"mesh: {self.mesh}")
        for kind, nbytes, read, written in self.stored:
            lines.append(
                f"elsewhere: {nbytes:,} of these bytes ({kind}); a step reads {read:,} and writes "
                f"{written:,}"
            )
        if self.num_ranks > 1:
            lines.append(_TRAFFIC)
        lines += self.found + self.notes
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        bars = []
        for row in self.rows:
            here, state = f"{row.nbytes:,}", f"{row.state_nbytes:,}"
            cells = (row.unit, row.where, here, row.state_where or "-", state)
            kind = "params" if row.leaves else "other tensors"
            bars.append(Bar(cells, {kind: row.nbytes, "optimizer state": row.state_nbytes}))
        head = ("unit", "where", "bytes", "optimizer state", "bytes")
        return table_html(self._total, head, bars, text=str(self))

    @property
    def _total(self) -> str:
        holder = "this process"
        if self.num_ranks > 1:
            holder = f"rank {self.rank} of {self.num_ranks}"
        return f"{holder} holds {self.nbytes:,} bytes"


# Which a loss decides: a plan runs it
_TRAFFIC = "bytes per step, and their least time: fz.plan(params, step, batch=..., bandwidth=...)"
_HEAD = (
    "unit",
    "leaves",
    "storage",
    "compute",
    "wire",
    "where",
    "bytes",
    "state",
    "where",
    "bytes",
)
_NUMBERS = (1, 6, 9)  # columns that are aligned to the right


def _cells(row: Row) -> tuple[str, ...]:
    """The row's entries, a cell per column of the head.

    Tensors that belong to no leaf have no number of leaves and no compute dtype: "". Nor have trees
    in pieces a compute dtype. "-" says that nothing travels, or that there is no optimizer's state.
    """
    wire = ", ".join(f"{message} {short(form)}" for message, form in row.wire)
    return (
        row.unit,
        str(len(row.leaves) or ""),
        _dtypes(row.storage),
        "" if row.compute is None else short(row.compute),
        wire or "-",
        row.where,
        f"{row.nbytes:,}",
        _dtypes(row.state) or "-",
        row.state_where or "-",
        f"{row.state_nbytes:,}",
    )


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(short, dtypes))


AnyStep = ProgramStep | ShardedStep


def describe(step: AnyStep, state: State) -> Description:
    """A rank's part of a state, unit by unit: dtypes, traffic, bytes, and the share of the whole.
    Print it for a table.

    Of a step for one process it describes the whole state. No communication. How many bytes a step
    sends, and the least time for them, follow from its loss: `plan(params, step, batch=...,
    bandwidth=...)` of the same sharded step gives both.

    Args:
        step: the step that the state belongs to, from `train_step`, `program_step` or `shard`.
        state: made by `step.init` or returned by the step.

    Raises:
        DonatedError: a step has taken the state's storage.
        StructureError: the state was sharded for another step, level, group or rank.
        TypeError: `state` is no state.

    >>> from functorch_zero import optim, train_step
    >>> step = train_step(lambda params, buffers, batch: params["w"].sum(), optim.adam(0.1))
    >>> describe(step, step.init({"w": torch.zeros(3, requires_grad=True)})).nbytes
    76
    """
    check_state(state)
    if isinstance(step, ProgramStep) and state.sharding is not None:
        raise StructureError(
            "a sharded state was given with an unsharded step. Remedy: describe it with the step "
            "that made it"
        )
    if isinstance(step, TrainStep):
        nodes = _Nodes.of(_as_on_one_rank(step, state), step.nameless)
        return Description(
            rows=tuple(_rows(nodes, sends=False)),
            rank=0,
            num_ranks=1,
            optimizer=repr(step.optimizer),
            found=nodes.found_units,
        )
    if isinstance(step, ProgramStep):
        rows = [_plain(name, tensors) for name, tensors in _by_field(state).items()]
        return Description(tuple(rows), rank=0, num_ranks=1, optimizer=repr(step))
    step.check_state(state)
    options, unsharded = step.options, step.unsharded
    seams = [f"{name}={seam}" for name, seam in options.printed_seams.items()]
    if options.reduce_bucket:
        seams.append(f"reduce_bucket={options.reduce_bucket:,} bytes")
    # The parts have rows of their own, which say how they are carried
    nodes = _Nodes.of(state.replace(parts=None), unsharded.nameless)
    rows = _rows(nodes, sends=step.group.size > 1)
    return Description(
        rows=(*rows, *_rows_of_parts(step, state)),
        rank=step.group.rank,
        num_ranks=step.group.size,
        optimizer=repr(unsharded.optimizer if isinstance(unsharded, TrainStep) else unsharded),
        seams=", ".join(seams),
        mesh=options.axes.mesh,
        stored=tuple(_stored(nodes, options.places)),
        found=nodes.found_units,
    )


class _Nodes(NamedTuple):
    """The nodes of a state that know how they are cut, and all other tensors."""

    trees: dict[str, ShardedTree]  # by the names of their places
    states: list[ShardedOptState]
    others: list[Tensor]

    @classmethod
    def of(cls, state: State, nameless: str | None) -> _Nodes:
        """Those of a state. The tree in the nameless place of its value has none."""
        found = cls({}, [], [])
        nodes = nodes_of(state)
        for path, node in zip(paths(state, is_on_engine), nodes, strict=True):
            if isinstance(node, ShardedTree):
                name = "" if path == nameless else path or node.holding.name
                found.trees[name] = node
            elif isinstance(node, ShardedOptState):
                found.states.append(node)
            elif isinstance(node, Tensor):
                found.others.append(node)
        return found

    @property
    def held(self) -> dict[str, ShardedTree]:
        """The trees that losses use."""
        return {n: tree for n, tree in self.trees.items() if tree.holding.form == "held"}

    @property
    def found_units(self) -> tuple[str, ...]:
        """A line per kind of units that nobody has chosen."""
        lines: tuple[str, ...] = ()
        for name, tree in self.held.items():
            lines += found_units(tree.sharding.layout.units, name)
        return lines

    def followed_by(self, state: ShardedOptState) -> ShardedTree | None:
        """The tree to whose leaves an optimizer's state belongs; None: it isn't there any more."""
        sharding = state.holding.sharding
        fitting = [tree for tree in self.held.values() if tree.holding == Holding(sharding, "held")]
        # Two networks may be cut alike; and an average is, as the params of its layout
        own = [tree for tree in fitting if tree.sharding.layout is sharding.layout] or fitting
        return min(own, key=lambda tree: tree.holding.read_only, default=None)


def _stored(nodes: _Nodes, places: Places) -> Iterator[Stored]:
    """The bytes that lie in places."""
    if places.state is not None:
        in_state: list[Tensor] = []
        for state in nodes.states:
            plan, layout = state.holding.plan, state.holding.sharding.layout
            own = StatePlaces(places.state, plan, layout)
            in_state += stored_tensors(own, state.as_it_lies)
        nbytes = bytes_held(in_state)
        yield Stored("state", nbytes, nbytes, nbytes)
    if places.params is not None:
        in_params: list[Tensor] = []
        trained: list[Tensor] = []  # of the params, those that a step writes
        for tree in nodes.held.values():
            flats, layout = tree.flats(), tree.sharding.layout
            in_params += stored_flats(places.params, flats, layout)
            if not tree.holding.read_only:
                trained += stored_flats(places.params, flats, layout, trained=True)
        nbytes = bytes_held(in_params)
        yield Stored("params", nbytes, nbytes, bytes_held(trained))


def _as_on_one_rank(step: TrainStep, state: State) -> State:
    """A whole state as if sharded at level 0 over one rank, of the same tensors."""
    options = Options.checked(step, Levels(0), axes_of(SingleRank()))
    layout = options.layout_of(marked(state))
    plan = plan_state(step.optimizer.init, layout, layout.trainable, 1)
    sharding = options.sharding(layout)
    return state.replace(
        params=ShardedTree.of_local(state.params, Holding(sharding, "held")),
        opt_state=ShardedOptState(state.opt_state, StateHolding(sharding, plan)),
    )


class _Slot(NamedTuple):
    """A leaf of an optimizer's state."""

    planned: StateLeaf
    tensor: Tensor  # this rank's part


def _rows(nodes: _Nodes, *, sends: bool) -> list[Row]:
    """A row per bucket of each tree, in the order of the units, and those of tensors that belong to
    no leaf.

    `sends`: whether there are other ranks.
    """
    # By the tree's id and the leaf's number: its leaves of optimizers' states
    slots = defaultdict[tuple[int, int], list[_Slot]](list)
    shared: list[_Slot] = []  # belong to no leaf: the optimizers' counts and their like
    for state in nodes.states:
        tree = nodes.followed_by(state)
        leaves = optree.tree_leaves(state.as_it_lies)
        for planned, x in zip(state.holding.plan.leaves, leaves, strict=True):
            if isinstance(x, Tensor):
                is_shared = tree is None or planned.kind == "replicated"
                own = shared if is_shared else slots[id(tree), planned.leaf]
                own.append(_Slot(planned, x))
    rows: list[Row] = []
    for name, tree in nodes.trees.items():
        rows += _rows_of_tree(name, tree, slots, sends=sends)
    if shared:
        pieces = nodes.states[0].holding.sharding.layout.num_ranks
        where = _shares([slot.planned for slot in shared], pieces) or "whole"
        rows.append(_plain("(optimizer)", [slot.tensor for slot in shared], where))
    rows.append(_plain("(buffers and counts)", nodes.others))
    return rows


def _rows_of_tree(
    name: str,
    tree: ShardedTree,
    slots: Mapping[tuple[int, int], list[_Slot]],
    *,
    sends: bool,
) -> Iterator[Row]:
    """A row per bucket of a sharded tree that has leaves here."""
    layout, is_in_pieces = tree.sharding.layout, tree.holding.form == "pieces"
    leaves, published = layout.treedef.flatten_up_to(tree.local_tree), tree.published()
    for unit in layout.units:
        for b in unit.buckets:
            bucket, whole = layout.buckets[b], published[b]
            # In pieces, frozen leaves are None, and so are all of a tree that is read only
            here = [leaves[n] for n in bucket.leaves if leaves[n] is not None]
            if not here:
                continue
            # No step takes gradients of a tree that is read only, nor updates it
            is_updated = bucket.trainable and not tree.holding.read_only
            own = [slot for n in bucket.leaves for slot in slots.get((id(tree), n), ())]
            state = [slot.tensor for slot in own]
            storage = _distinct_dtypes(here)
            where = _share(bucket.cut.num_pieces if is_in_pieces else bucket.cut.num_held)
            if whole is not None:
                here.append(whole)
                where += f", whole as {short(bucket.gather)}"
            yield Row(
                unit=dotted(name, unit.name or "root"),
                leaves=tuple(dotted(name, layout.leaves[n].path) for n in bucket.leaves),
                elements=sum(bucket.numels),  # without padding, which the bytes include
                storage=storage,
                # Pieces are gradients, say, which no loss uses
                compute=None if is_in_pieces else bucket.compute,
                wire=wire_of(bucket, is_updated) if sends and not is_in_pieces else (),
                where=where,
                nbytes=bytes_held(here),
                state=_distinct_dtypes(state),
                state_where=_shares([slot.planned for slot in own], bucket.cut.num_pieces),
                state_nbytes=bytes_held(state),
            )


def _shares(leaves: Iterable[StateLeaf], num_pieces: int) -> str:
    """The share of these leaves of an optimizer's state that is here; "" where they belong to no
    param."""
    # A chain may hold both kinds of state for one param
    kinds = {leaf.kind for leaf in leaves}
    shares = []
    if not kinds.isdisjoint({"follows", "rows"}):
        shares.append(_share(num_pieces))
    if "owned" in kinds:
        shares.append("at owners")
    return ", ".join(shares)


def _by_field(state: State) -> dict[str, list[Tensor]]:
    """The tensors of a whole state, by the first name of their paths."""
    leaves = named_leaves(state).items()
    return grouped((path.partition(".")[0], x) for path, x in leaves if isinstance(x, Tensor))


def _rows_of_parts(step: ShardedStep, state: State) -> list[Row]:
    """A row for each name under which a part keeps something."""
    if state.parts is None:
        return []
    step.parts_of(state).check(state.parts)
    # The share that is here, by how the reduction carries a tensor
    shares = {
        "sum": "a share of the sum",
        "pieces": _share(step.options.axes.optimizer.size),
        "same": "whole",
    }
    rows = []
    for name, carried in step.options.reduction.keeps.items():
        tensors = optree.tree_leaves(state.parts["reduction"][name])
        rows.append(_plain(f"(reduction: {name})", tensors, shares[carried]))
    return rows


def _plain(name: str, tensors: Sequence[Tensor], where: str = "whole") -> Row:
    """The row of tensors that belong to no leaf."""
    elements = sum(x.numel() for x in tensors)
    dtypes = _distinct_dtypes(tensors)
    return Row(name, (), elements, dtypes, None, (), where, bytes_held(tensors))


def _share(num_pieces: int) -> str:
    return "whole" if num_pieces == 1 else f"1/{num_pieces}"


def _distinct_dtypes(tensors: Iterable[Tensor]) -> tuple[torch.dtype, ...]:
    """In the order in which they come first."""
    return tuple(dict.fromkeys(x.dtype for x in tensors))
