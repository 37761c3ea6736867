"""`Plan`: the memory and traffic of a sharded step, as plain data, tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..errors import explain
from ..layout.layout import Layout
from ..layout.levels import level_in_words
from ..optim.base import Needs, Transform
from ..precision import short
from ..sharded.drawing import Bar, align, table_html
from ..sharded.placed import Stored
from ..sharded_optim.state_plan import Planner
from ..tree import grouped

KINDS = {  # of memory: the field of a `Sample`, and its name for people
    "params": "params",
    "state": "optimizer state",
    "gradients": "gradients",
    "gathered": "gathered params",
    "activations": "activations, temporaries",
}
# A plan's numbers, in the order of its JSON
_NUMBERS = (
    "level",
    "levels",
    "num_ranks",
    "rank",
    "num_params",
    "params",
    "gradients",
    "state",
    "buffers",
    "gathered",
    "parts",
    "activations",
    "sent_bytes",
    "traced",
    "assumed",
)
Bandwidth = float | Mapping[str, float]  # bytes per second; of all links, or by a mesh's axis
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))  # decimal, as vendors count


class Collective(NamedTuple):
    """One collective that a rank calls in a step."""

    phase: str  # forward, backward, metrics, buffers, optimizer or publish
    kind: str  # the group's method
    unit: str  # whose bucket; empty where it belongs to no unit
    dtype: torch.dtype
    # Of the longest tensor: all_gather's out, reduce_scatter's whole, all_to_all's source
    num_elements: int
    sent_bytes: float  # by this rank, at least, on a ring
    group: str  # its ranks: "all 64", "shard 8"

    @property
    def nbytes(self) -> int:
        """Bytes of the longest tensor."""
        return self.num_elements * self.dtype.itemsize


class Sample(NamedTuple):
    """A rank's memory at one moment of a step, in bytes by kind."""

    moment: str  # "forward of blocks.0", say
    params: int
    state: int  # the optimizer's, and that of the step's parts
    gradients: int
    gathered: int
    activations: int  # and temporaries

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(self[1:])

    def by_kind(self) -> dict[str, int]:
        """The bytes by the kinds' names for people."""
        return {name: getattr(self, field) for field, name in KINDS.items()}


class Owned(NamedTuple):
    """One leaf of a whole-leaf optimizer, at its owner."""

    path: str
    owner: int
    cost: float


class Balance(NamedTuple):
    """How evenly whole leaves are spread over their owners."""

    leaves: tuple[Owned, ...]
    num_ranks: int

    def loads(self) -> list[float]:
        """Each rank's cost."""
        loads = [0.0] * self.num_ranks
        for leaf in self.leaves:
            loads[leaf.owner] += leaf.cost
        return loads

    @property
    def imbalance(self) -> float:
        """The busiest rank's cost, in units of the mean: 1 is even, `num_ranks` is all at one."""
        loads = self.loads()
        # No owners, or leaves without cost: even
        return max(loads) * len(loads) / (sum(loads) or 1.0)


def bytes_text(nbytes: float) -> str:
    """Bytes for people: decimal units, three digits or so.

    >>> bytes_text(31_400_000_000), bytes_text(999), bytes_text(0)
    ('31.4 GB', '999 B', '0 B')
    """
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def format_collectives(collectives: Sequence[Collective]) -> str:
    """One line for all calls of a phase, kind and dtype."""
    # (phase, kind, dtype) -> its calls, in the order of the first
    alike = grouped(((call.phase, call.kind, short(call.dtype)), call) for call in collectives)
    rows = [["phase", "kind", "dtype", "calls", "bytes", "sent"]]
    for key, calls in (*alike.items(), (("total", "", ""), collectives)):
        nbytes, sent = sum(call.nbytes for call in calls), sum(call.sent_bytes for call in calls)
        rows.append([*key, str(len(calls)), bytes_text(nbytes), bytes_text(sent)])
    rows[-1][-2] = ""  # those of a gather and of a reduction have no sum
    return "\n".join("  " + line for line in align(rows, right=range(1, 6)))


def balance_of(optimizer: Transform, layout: Layout) -> Balance | None:
    """How evenly whole leaves are spread over owners; None where the optimizer needs none."""
    # Pointwise and statistics need no owners
    if optimizer.needs < Needs.WHOLE_ROWS:
        return None
    # The planner answers `init`'s questions, and notes the leaves that ask for an owner
    # By placeholders: nothing of the model's size is made
    planner = Planner(layout, layout.trainable, layout.num_ranks)  # of the trained leaves
    optimizer.init(planner.placeholders(), planner)
    owned = []
    for n, owner, cost in planner.owned:  # cost: the transform's own, by default elements
        if owner >= 0:  # else every rank has it whole, or its rows
            owned.append(Owned(layout.leaves[n].path, owner, cost))
    return Balance(tuple(owned), layout.num_ranks) if owned else None


@dataclass(frozen=True)
class Plan:
    """The memory of one rank between steps and in a step, and the bytes that it sends.

    Print it for a table; `to_json` has everything; `draw` makes a picture. A notebook shows the
    peak as bars.

    Attributes:
        level: 0 to 3; None where leaves may differ in it.
        levels: those of the leaves, each once.
        num_ranks: the ranks.
        rank: the one rank. Ranks differ only in the leaves they own and in their parts of buckets
            that are not full.
        num_params: elements of all leaves.
        params, state: bytes of a rank, between steps.
        gradients: bytes of a rank's reduced ones, from backward to update.
        gathered: the most bytes of gathered params at a time.
        buffers: bytes of the model's buffers, on every rank.
        samples: memory from unit to unit, in the order of a step in its steady state.
        collectives: all of a step, in order.
        balance: of the owners, where the optimizer has whole-leaf links.
        traced: whether a sample batch was run; if not, there are no activations in it and the order
            of units is the layout's.
        assumed: how many yes-no questions about values the step asked on the host; answered with
            yes.
        parts: bytes that parts of the step keep between steps, a rank's.
        stored: by kind, the bytes that lie elsewhere, in a `place`, and those that a step reads and
            writes there. The samples don't have them.
        mesh: the sizes of a mesh's axes, and along which of them all ranks have the same data; ""
            for one axis.
        notes: lines about codecs, sparse gradients, and a unit of more than half of the parameters.
        bandwidth: of the links, as `plan` was given it; None: nobody asks for times.
    """

    level: int | None
    levels: tuple[int, ...]
    num_ranks: int
    rank: int
    num_params: int
    params: int
    gradients: int
    state: int
    buffers: int
    gathered: int
    samples: tuple[Sample, ...]
    collectives: tuple[Collective, ...]
    balance: Balance | None
    traced: bool
    assumed: int = 0
    parts: int = 0
    stored: tuple[Stored, ...] = ()
    mesh: str = ""
    notes: tuple[str, ...] = ()
    bandwidth: Bandwidth | None = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None:
            self._links(self.bandwidth)  # raises where they aren't those of the mesh

    @property
    def peak(self) -> Sample:
        """The moment with most memory."""
        return max(self.samples, key=lambda sample: sample.total)  # the first of them

    @property
    def activations(self) -> int:
        """The most there is of activations at a time; 0 where no batch was run."""
        return max(sample.activations for sample in self.samples)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends in a step at least, on a ring."""
        return sum(c.sent_bytes for c in self.collectives)

    def seconds(self, bandwidth: Bandwidth | None = None) -> float:
        """The least time for a step's communication: that of the busiest links.

        Args:
            bandwidth: bytes per second that a rank can send, one way. Of a mesh, perhaps by axis:
                {"shard": 300e9, "replicate": 25e9}. The links of two axes work at once, and what
                all ranks send each other passes through the slower ones. None: the plan's own.
        """
        if bandwidth is None:
            bandwidth = self.bandwidth
        if bandwidth is None:
            raise TypeError("seconds takes a bandwidth, unless plan(bandwidth=...) was given one")
        links = self._links(bandwidth)
        slowest = min(links, key=links.__getitem__)
        sent = dict.fromkeys(links, 0.0)
        for collective in self.collectives:
            axis = collective.group.partition(" ")[0]
            sent[axis if axis in links else slowest] += collective.sent_bytes
        return max(sent[axis] / links[axis] for axis in links)

    def _links(self, bandwidth: Bandwidth) -> Mapping[str, float]:
        """Bytes per second by axis; of one link for everything, by ""."""
        links = bandwidth if isinstance(bandwidth, Mapping) else {"": bandwidth}
        axes = {"shard", "replicate"} if self.mesh else {""}
        if set(links) not in ({""}, axes) or not all(x > 0 for x in links.values()):
            numbers = ", or of each axis: {'shard': ..., 'replicate': ...}" if self.mesh else ""
            raise ValueError(
                explain(
                    f"the bandwidth of a plan for {self.mesh or f'{self.num_ranks} ranks'}",
                    expected=f"bytes per second, above 0{numbers}",
                    got=repr(bandwidth),
                )
            )
        return links

    def to_json(self) -> str:
        """Everything in the plan, as a JSON object."""
        made = {name: getattr(self, name) for name in _NUMBERS}
        made |= {"mesh": self.mesh, "notes": list(self.notes)}
        if self.bandwidth is not None:
            made |= {"bandwidth": self.bandwidth, "seconds": self.seconds()}
        made["stored"] = [stored._asdict() for stored in self.stored]
        # "bytes" is the sum; the kinds stand beside it
        made["peak"] = {"bytes": self.peak.total, **self.peak._asdict()}
        made["samples"] = [sample._asdict() for sample in self.samples]
        made["collectives"] = []
        for call in self.collectives:
            named = {"dtype": short(call.dtype), "bytes": call.nbytes}
            made["collectives"].append(call._asdict() | named)
        made["balance"] = None
        if self.balance is not None:
            leaves = [leaf._asdict() for leaf in self.balance.leaves]
            made["balance"] = {"imbalance": self.balance.imbalance, "leaves": leaves}
        return json.dumps(made, indent=1)

    def draw(self, path: str) -> None:
        """Draw one step's memory over its moments, stacked by kind, into a file. Needs matplotlib
        (extra `plot`)."""
        figure_of_step(self.samples, title=self._title).savefig(path)

    # At a prompt and in a notebook, too
    def __repr__(self) -> str:
        peak = self.peak
        kinds = ["params", "gradients", "state", "buffers", "gathered"]
        kinds += ["parts"] if self.parts else []  # seldom there
        rows = [["mesh", self.mesh]] if self.mesh else []
        rows += [[kind, bytes_text(getattr(self, kind))] for kind in kinds]
        if self.traced:
            rows.append(["activations", bytes_text(self.activations)])
        for kind, *numbers in self.stored:
            most, read, written = map(bytes_text, numbers)
            text = f"{most} of {kind}; a step reads {read} and writes {written}"
            rows.append(["elsewhere", text])
        rows.append(["peak", f"{bytes_text(peak.total)} at {peak.moment}"])
        if self.bandwidth is not None:
            rows.append(["at least", f"{self.seconds():.3g} s of communication per step"])
        lines = [f"{self._title}, {self.num_params:,} params; of rank {self.rank}:"]
        lines += [f"  {name:12s} {value}" for name, value in rows]
        if self.balance is not None:
            lines.append(
                f"  owners of {len(self.balance.leaves)} leaves: the busiest has "
                f"{self.balance.imbalance:.2f} of the mean"
            )
        lines += [f"  {note}" for note in self.notes]
        lines += ["a step's collectives:", format_collectives(self.collectives)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        peak = self.peak
        bars = [
            Bar((kind, bytes_text(nbytes)), {kind: nbytes})
            for kind, nbytes in peak.by_kind().items()
        ]
        bars.append(Bar(("peak", bytes_text(peak.total)), peak.by_kind()))
        title = f"{self._title}: the peak of rank {self.rank}, at {peak.moment}"
        return table_html(title, ("", "bytes"), bars, text=str(self))

    @property
    def _title(self) -> str:
        return f"{level_in_words(self.level, self.levels)}, {self.num_ranks} ranks"


@dataclass(frozen=True)
class Comparison:
    """Several plans side by side, each at its peak. It prints as a table; a notebook shows bars.

    Attributes:
        plans: by label: "level 3", say.

    >>> import torch
    >>> from functorch_zero import optim, plan
    >>> params = {"w": torch.empty(1000, 1000, device="meta", requires_grad=True)}
    >>> Comparison({f"on {n}": plan(params, optim.adam(0.1), level=3, ranks=n) for n in (4, 8)})
            params  optimizer state  gradients  gathered params  activations, temporaries     peak
    on 4    1.0 MB           2.0 MB     5.0 MB              0 B                    4.0 MB  12.0 MB
    on 8  500.0 kB           1.0 MB     4.5 MB              0 B                    8.0 MB  14.0 MB
    """

    plans: Mapping[str, Plan]

    def __repr__(self) -> str:
        rows = [["", *KINDS.values(), "peak"]]
        for label, made in self.plans.items():
            peak = made.peak
            rows.append([label, *map(bytes_text, [*peak.by_kind().values(), peak.total])])
        return "\n".join(align(rows, right=range(1, len(rows[0]))))

    def _repr_html_(self) -> str:
        bars = []
        for label, made in self.plans.items():
            peak = made.peak
            bars.append(Bar((label, bytes_text(peak.total)), peak.by_kind()))
        return table_html("The peak of a rank in a step", ("", "peak"), bars, text=str(self))


def figure_of_step(samples: Sequence[Sample], *, title: str) -> Any:
    """A step's memory over its moments: one area per kind, one place per sample, in MB."""
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib. Remedy: pip install 'functorch-zero[plot]'"
        ) from error
    axes = figure.add_subplot()
    axes.set_title(title)
    areas = []
    for field in KINDS:
        areas.append([getattr(sample, field) / 1e6 for sample in samples])
    axes.stackplot(range(len(samples)), areas, labels=KINDS.values(), step="mid")
    every = max(1, len(samples) // 24)  # more names than about 24 would overlap
    named = range(0, len(samples), every)
    names = [samples[i].moment for i in named]
    axes.set_xticks(list(named), names, rotation=90, fontsize=6)
    axes.set_ylabel("MB of a rank")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def zero_bytes(
    num_params: float,
    ranks: int,
    *,
    level: int,
    params: float = 2,
    gradients: float = 2,
    state: float = 12,
) -> float:
    """The bytes of params, gradients and optimizer state that a rank holds.

    Args:
        num_params: elements.
        ranks: how many share them.
        level: 0 to 3; the paper's stages.
        params, gradients, state: bytes per element. The defaults are mixed-precision Adam's:
            half-precision params and gradients, and a float32 copy and two moments (the paper's K =
            12).

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020), figure 1.

    >>> [round(zero_bytes(7.5e9, 64, level=level) / 1e9, 1) for level in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    if ranks < 1 or level not in range(4):
        raise ValueError(
            f"expected ranks of at least 1 and a level from 0 to 3, got {ranks} and {level}"
        )
    # The order in which levels 1, 2 and 3 cut them
    cut = (state, gradients, params)[:level]
    whole = (state, gradients, params)[level:]
    return num_params * (sum(whole) + sum(cut) / ranks)
