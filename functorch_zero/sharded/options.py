"""`Options`: the arguments of `shard`, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from ..errors import check_choice, explain
from ..groups.mesh import Axes
from ..groups.protocol import Group
from ..layout.build import default_units, make_layout
from ..layout.layout import Cut, Layout
from ..layout.levels import Levels, level_in_words
from ..layout.sharding import Sharding
from ..places import ByUnit, Place, PlaceRule, settle
from ..precision import Dtypes
from ..runtime.prefetch import Overlap
from ..runtime.reduce import SUMMED, Carried, Reduction
from ..step.evaluate import EvalStep
from ..step.program_step import ProgramStep
from ..step.train import TrainStep
from ..tree import PyTree, check_patterns, dotted
from .buffers import SyncBuffers


@dataclass(frozen=True)
class StatePlace:
    """The place of a rank's part of a state, as in `Sharding`."""

    level: int | None  # None: leaves differ in it
    num_pieces: int  # of the optimizer's state
    rank: int
    mesh: tuple[int, int, int]  # the number of replicas, the ranks in each, this rank's piece
    # "levels 1 and 3", say. A rule and a layout may say it differently
    level_in_words: str = field(compare=False)

    def __str__(self) -> str:
        text = f"{self.level_in_words}, {self.num_pieces} ranks, rank {self.rank}"
        replicas, ranks, number = self.mesh
        if replicas > 1:
            text += f" of a mesh of {replicas} replicas of {ranks} ranks, pieces {number}"
        return text


ReduceGradients = Literal["every_microbatch", "once"]
StateAxes = Literal["shard", "both"]
OverlapChoice = Literal["memory", "time"] | Overlap


class ShardOptions(TypedDict, total=False):
    """The arguments of `shard` beside the level and the group."""

    donate: bool | None
    sync_buffers: SyncBuffers
    reshard_after_forward: bool
    reduce_gradients: ReduceGradients | None
    state_axes: StateAxes
    overlap: OverlapChoice | None
    reduction: Reduction | None
    place: Mapping[str, PlaceRule] | None
    reduce_bucket: int | None


@dataclass(frozen=True)
class Places:
    """The places of what a rank holds, by kind; None: memory beside the params."""

    state: ByUnit | None = None  # of the optimizer, between updates
    params: ByUnit | None = None  # as they are held between steps
    gradients: ByUnit | None = None  # those that add up, and their sums, up to the update
    saved: ByUnit | None = None  # tensors that autograd saves for backward

    @property
    def given(self) -> dict[str, ByUnit]:
        """Those that were given, by kind."""
        by_kind = {each.name: getattr(self, each.name) for each in fields(self)}
        return {kind: places for kind, places in by_kind.items() if places is not None}

    def check_units(self, units: Sequence[str], arguments: Sequence[str] = ()) -> None:
        """Raise if a pattern names none of the units of these paths.

        Args:
            arguments: of a program's `init`, by whose names paths begin.
        """
        for kind, places in self.given.items():
            check_patterns(
                places.rule,
                units,
                option=f"place[{kind!r}]",
                names="unit",
                remedy="functionalize(units=...) makes units, and leaves of one lie together",
                arguments=arguments,
            )


@dataclass(frozen=True)
class Options:
    """The arguments of `shard`. See there."""

    levels: Levels
    axes: Axes  # of this rank's group
    donate: bool
    sync_buffers: SyncBuffers
    reshard_after_forward: bool
    reduce_gradients: ReduceGradients | None = None  # None: as the level's row says
    overlap: Overlap | None = None  # None: the device's own choice
    reduction: Reduction = SUMMED
    places: Places = field(default_factory=lambda: Places())
    reduce_bucket: int = 0  # bytes of gradients that are summed as one; 0: each bucket by itself
    aligned: bool = True  # as `make_layout` takes it; false in proofs

    @classmethod
    def checked(
        cls,
        step: EvalStep | ProgramStep,
        levels: Levels,
        axes: Axes,
        *,
        donate: bool | None = None,
        sync_buffers: Any = "mean",
        reshard_after_forward: bool = True,
        reduce_gradients: Any = None,
        overlap: Any = None,
        reduction: Any = None,
        place: Any = None,
        reduce_bucket: Any = None,
    ) -> Options:
        """The options that these arguments of `shard` stand for, each checked on its own before
        ranks compare them, in `init`.

        Raises:
            ValueError, TypeError: an argument is none of those that `shard` takes.
            NotImplementedError: two of them don't go together.
        """
        trains = isinstance(step, TrainStep)
        loss_scale = isinstance(step, TrainStep) and step.policy.scaling is not None
        return cls(
            levels=levels,
            axes=axes,
            donate=trains if donate is None else donate,
            sync_buffers=check_sync_buffers(step, sync_buffers),
            reshard_after_forward=reshard_after_forward,
            reduce_gradients=check_reduce_gradients(reduce_gradients, levels),
            overlap=check_overlap(overlap),
            reduction=check_reduction(reduction, loss_scale=loss_scale),
            places=check_places(place),
            reduce_bucket=check_reduce_bucket(reduce_bucket, levels, reduction),
        )

    @property
    def in_words(self) -> str:
        """For the repr of a step: "level 3, rank 0 of 2"."""
        group = self.group
        # Of levels by leaf no more: the layout has them
        return f"{level_in_words(self.levels.number, [])}, rank {group.rank} of {group.size}"

    def describe(self) -> dict[str, Any]:
        """The options as plain data, for comparing ranks. The levels are not among them:
        `init` compares these first, since other options depend on them."""
        return {
            "donate": self.donate,
            "sync_buffers": self.sync_buffers,
            "reshard_after_forward": self.reshard_after_forward,
            "reduce_gradients": self.reduce_gradients,
            "ranks of the shard axis": self.axes.shard.size,
            "axis of the same data": self.axes.same_data and self.axes.same_data.name,
            "state_axes": "both" if self.axes.both else "shard",
            "overlap": str(self.overlap),
            "reduce_bucket": self.reduce_bucket,
            "aligned leaves": self.aligned,
            **self.printed_seams,
        }

    @property
    def printed_seams(self) -> dict[str, str]:
        """The objects that were given for seams, by the argument of `shard`, as they print."""
        given: dict[str, str] = {}
        # The defaults are no seams: nothing was given
        if self.reduction is not SUMMED:
            given["reduction"] = _printed(self.reduction)
        for kind, places in self.places.given.items():
            rows = [f"{pattern!r}: {_printed(own)}" for pattern, own in places.rule.items()]
            one = _printed(places.of("")) if places.is_one else None
            given[f"place of {kind}"] = one or "{" + ", ".join(rows) + "}"
        return given

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.axes.world

    @cached_property
    def place(self) -> StatePlace:
        """The place of this rank's part of a state."""
        axes = self.axes
        # States that say the same here fit this step
        return StatePlace(
            level=self.levels.number,
            num_pieces=axes.optimizer.size,
            rank=self.group.rank,
            mesh=(axes.replicate.size, axes.shard.size, axes.piece_number),
            level_in_words=self.levels.in_words,
        )

    def sharding(self, layout: Layout) -> Sharding:
        """The static part of a state that is cut so."""
        places = self.places.state
        return Sharding(
            layout,
            self.place.level,
            self.place.rank,
            self.place.mesh,
            settle=None if places is None else partial(settle, places.distinct),
        )

    def layout_of(self, params: PyTree[Tensor]) -> Layout:
        """The layout of a tree. Leaves with `requires_grad` are trained, the others are frozen.

        Raises:
            ValueError: gradients would be reduced in two ways.
        """
        self.levels.check(params)
        layout = self.layout_under("", params)
        self.places.check_units([unit.path for unit in layout.units])
        return layout

    def layout_under(self, name: str, tree: PyTree[Tensor]) -> Layout:
        """The layout of a tree of this name, by which options see the paths of its leaves begin.

        Raises:
            ValueError: as `layout_of`.
        """
        units = default_units(tree)
        sparse = {path for unit in units for path in unit.sparse}

        def cut(path: str, leaf: Any, dtypes: Dtypes | None) -> Cut:
            level = self.levels.of(dotted(name, path), leaf, is_sparse=path in sparse)
            # Without `both`, replicas have the same pieces
            replicate = self.axes.replicate.size if self.axes.both else 1
            narrows = dtypes is not None and dtypes.narrows(leaf.dtype)
            return level.cut(self.axes.shard.size, replicate, narrows=narrows)

        layout = make_layout(
            tree,
            self.axes.optimizer.size,
            trainable=lambda path, leaf: leaf.requires_grad,
            units=units,
            cut=cut,
            aligned=self.aligned,
            name=name,
        )
        self.check_reduction_of(layout)
        return layout

    def check_reduction_of(self, layout: Layout) -> None:
        """Raise ValueError if a bucket's gradients would travel by a codec, and by a `reduction` of
        the user's own."""
        if self.reduction is SUMMED:
            return
        for bucket in layout.buckets:
            if bucket.trainable and not isinstance(bucket.reduce, torch.dtype):
                raise ValueError(
                    explain(
                        f"reduction={type(self.reduction).__name__} and Precision(reduce="
                        f"{bucket.reduce}) both say how gradients travel",
                        path=layout.leaves[bucket.leaves[0]].path,
                        rank=self.group.rank,
                        remedy="give one of them; the reduction may encode by itself",
                    )
                )


OVERLAPS: dict[str, Overlap] = {"memory": Overlap.memory, "time": Overlap.time}


def check_reduce_gradients(value: Any, levels: Levels) -> ReduceGradients | None:
    """The choice, if it is one that the level has."""
    check_choice("reduce_gradients", value, (*get_args(ReduceGradients), None))
    # With levels by leaf the choice concerns those of level 2 and 3
    if value == "every_microbatch" and levels.number in (0, 1):
        raise ValueError(
            f"level {levels.number} keeps whole gradients until the update, so they can't add up "
            "in pieces. Remedy: level 2, which is level 1 with gradients in pieces"
        )
    return value  # type: ignore[no-any-return]


def check_state_axes(value: Any) -> StateAxes:
    """The choice, if it is one."""
    check_choice("state_axes", value, get_args(StateAxes))
    return value  # type: ignore[no-any-return]


def check_overlap(value: Any) -> Overlap | None:
    """The choice of that name; an `Overlap`, or None, as it is."""
    if value is None or isinstance(value, Overlap):
        return value
    check_choice("overlap", value, OVERLAPS)
    return OVERLAPS[value]


def check_reduction(value: Any, *, loss_scale: bool) -> Reduction:
    """The reduction, if it is one; gradients summed as they are, if it is None."""
    if value is None:
        return SUMMED
    if isinstance(value, type) or not isinstance(value, Reduction):
        raise TypeError(
            f"reduction must be an object with `keeps`, `init` and `start`, got {value!r}. Remedy: "
            "see runtime.reduce.Reduction"
        )
    unknown = {*value.keeps.values()} - {*get_args(Carried)}
    if unknown:
        raise ValueError(
            f"{type(value).__name__}.keeps: carried must be one of {get_args(Carried)}, got "
            f"{sorted(map(repr, unknown))}"
        )
    if value.keeps and loss_scale:
        raise NotImplementedError(
            f"reduction={type(value).__name__} keeps gradients between steps, and a loss scale "
            "changes what they are multiplied by. Remedy: train in bfloat16, without loss_scale"
        )
    return value


def check_places(value: Any) -> Places:
    """The places, by kind of what lies there."""
    kinds = [each.name for each in fields(Places)]
    if value is None:
        return Places()
    if not isinstance(value, Mapping) or not {*value} <= {*kinds}:
        raise TypeError(
            f"place must be a dict of places by kind, of which there are {kinds}, got {value!r}. "
            'Remedy: place={"state": fz.places.File(folder)}'
        )
    found = {}
    for kind, given in value.items():
        rule = dict(given) if isinstance(given, Mapping) else {"": given}
        if not all(isinstance(p, str) for p in rule) or not all(map(_is_place, rule.values())):
            raise TypeError(
                f"place[{kind!r}] must be an object with `empty`, `holds`, `bring` and `leave`, or "
                f"a dict of such by patterns of units' paths, got {given!r}. Remedy: "
                "fz.places.File(folder), or see fz.places.Place"
            )
        if any(place is not None for place in rule.values()):
            found[kind] = ByUnit(rule)
    return Places(**found)


def _is_place(value: Any) -> bool:
    return value is None or (isinstance(value, Place) and not isinstance(value, type))


def check_reduce_bucket(value: Any, levels: Levels, reduction: Any) -> int:
    """The number of bytes; 0 if it is None."""
    if value is None:
        return 0
    if type(value) is not int or value < 1:
        raise ValueError(f"reduce_bucket must be a number of bytes, at least 1, got {value!r}")
    if levels.number == 3:
        raise ValueError(
            "reduce_bucket joins the gradients of several units, and level 3 works unit by unit, "
            "to hold one unit's at a time. Remedy: leave it out, or choose larger units"
        )
    if reduction is not None:
        raise NotImplementedError(
            f"reduce_bucket joins gradients that are summed as they are, and reduction="
            f"{type(reduction).__name__} is given each bucket's. Remedy: one of the two"
        )
    return value


def check_sync_buffers(step: EvalStep | ProgramStep, rule: Any) -> SyncBuffers:
    """The rule, if it is one for which the step has a place."""
    check_choice("sync_buffers", rule, get_args(SyncBuffers))
    if rule == "local" and isinstance(step, ProgramStep) and not step.buffers:
        raise ValueError(
            'sync_buffers="local" leaves each rank its own buffers, and the tensors of a '
            "program's value are the same on every rank. Remedy: program_step(..., "
            'buffers=("buffers",)), which says where they are; or "mean" or "rank0"'
        )
    return rule  # type: ignore[no-any-return]


def _printed(seam: Any) -> str:
    """The object with its settings where it prints them, as dataclasses do; else its class's name.
    Ranks compare this text, so it holds no address."""
    text = repr(seam)
    # Python's default repr, "<module.Class object at 0x...>"
    has_address = text.endswith(f"at {hex(id(seam))}>")
    return f"{type(seam).__name__}()" if has_address else text
