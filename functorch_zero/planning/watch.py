"""The memory of an imagined step from moment to moment: losses and phases announce themselves, and
each change of phase, and each growth of memory, makes a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import optree
import torch
from optree import PyTree
from torch import Tensor

from .._torch_private import FakeTensorMode
from ..groups.protocol import Group
from ..model.lazy_param import LazyParam
from ..params import nodes_of
from ..runtime.table import Asked, Reading
from ..runtime.unshard import UnitFlats
from ..sharded.program.gradient import LocalGradient
from ..step.loss import Aux
from ..tree import path_matches
from .live_bytes import LiveBytes
from .report import Collective, Sample


class MemoryWatch:
    """Samples of the bytes alive, and the record of a step, which the groups of all its axes write
    to.

    Args:
        fake: the mode of the tensors without values; None: the meta device.
        rows: how many rows of a table a lookup asks for, by pattern of its path.

    Attributes:
        phase: of the step: "forward", "backward", "metrics", "buffers", "optimizer" or "publish";
            of a program also "program", between those.
        unit: the name of the one in use; "" for none.
        recorded: the collectives so far.
        live: the bytes alive.
        samples: memory from moment to moment.
    """

    def __init__(self, fake: FakeTensorMode | None, rows: Mapping[str, int]):
        self.fake, self._rows = fake, rows
        self.phase, self.unit = "forward", ""
        self.recorded: list[Collective] = []
        self.live = LiveBytes(fake, self._sample)
        self.samples: list[Sample] = []
        self._highest = 0  # bytes of the last sample

    def begin(self) -> None:
        """Forget the samples and the collectives so far."""
        self.recorded.clear()
        self.samples.clear()
        self.live.assumed = 0

    def announced(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss, before and after which the phase changes. The batch's weight becomes 1.0, since
        nobody knows its value."""

        @functools.wraps(loss_fn)
        def loss(*args: Any, **named: Any) -> Any:
            leaves: list[Any] = nodes_of(args)
            lazy: list[Any] = [leaf for leaf in leaves if isinstance(leaf, LazyParam)]
            # A set, since a unit has many leaves; made for this pass, so that each is wrapped once
            for unit in {leaf.entrance.unit for leaf in lazy}:
                if unit.content.is_table:
                    asked = rows_asked_of(unit.name, self._rows)
                    unit.flats.reading = ImaginedIds(unit.flats.shape[0], asked)
                else:
                    unit.flats = AnnouncedFlats(unit.flats, unit.name, self)
            self.enter("forward")
            result = loss_fn(*args, **named)
            # The loss has returned: all that follows, up to the metrics, is backward
            self.enter("backward")
            return _with_known_weight(result)

        return loss

    def enter(self, phase: str) -> None:
        """The next phase of the step."""
        self.phase, self.unit = phase, ""
        self._sample()

    def adopt(self, kind: str, tensor: Tensor) -> None:
        """Whoever calls knows what a tensor is for; until then it counted as an activation."""
        self.live.adopt([tensor], kind)
        self._sample()

    def note(self, collective: Collective) -> None:
        """Record a collective. Where params are not gathered, the unit in use is known only when
        its gradients are reduced: the sample that has no name yet gets it then."""
        self.recorded.append(collective)
        if not collective.unit or collective.phase != "backward" or not self.samples:
            return
        last = self.samples[-1]
        if last.moment == "backward":
            self.samples[-1] = last._replace(moment=f"backward of {collective.unit}")

    def _sample(self) -> None:
        """Note the memory of this moment: of each unit in each phase the highest sample stays."""
        phase, unit = self.phase, self.unit
        # Units are named in passes alone; other phases are of all units
        in_a_unit = unit and phase in ("forward", "backward")
        moment = f"{phase} of {unit}" if in_a_unit else phase
        is_new = not self.samples or self.samples[-1].moment != moment
        # Lower than before in the same moment: the peak of a moment is what counts
        if not is_new and self.live.total < self._highest:
            return
        self._highest = self.live.total
        sample = Sample(moment, **self.live.now)
        if is_new:
            self.samples.append(sample)
        else:
            self.samples[-1] = sample


def _with_known_weight(result: Any) -> Any:
    """A loss's result, its weight 1.0 where it has one."""
    has_aux = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Aux)
    if not has_aux:
        return result
    loss, aux = result
    weight = None if aux.weight is None else 1.0
    return loss, replace(aux, weight=weight)


def with_numbers(local: LocalGradient, buffers: PyTree[Tensor], live: LiveBytes) -> LocalGradient:
    """The passes' result on which ranks can agree: means have values, and buffers are new only
    where the old ones were written to.

    Args:
        local: without values.
        buffers: that the loss was given.
        live: knows which copies nobody has written to.
    """
    outcome, means, changes = local.outcome, local.means, local.changes
    after, treedef = optree.tree_flatten(outcome.buffers)
    new, changed = [], []
    old = optree.tree_leaves(buffers)
    for before, buffer, known in zip(old, after, changes.known, strict=True):
        # A copy that nobody wrote to is not synchronized on a real rank
        is_kept = live.is_untouched_copy(buffer, before)
        new.append(before if is_kept else buffer)
        changed.append(known and not is_kept)
    # Their values decide nothing here
    zeros = {name: torch.zeros((), device="cpu") for name in means.values}
    vector = torch.zeros(means.vector.shape, dtype=means.vector.dtype, device="cpu")
    weight = None if means.weight is None else 1.0
    return local._replace(
        outcome=outcome._replace(buffers=treedef.unflatten(new)),
        means=means._replace(values=zeros, weight=weight, vector=vector),
        changes=changes._replace(known=changed),
    )


def rows_asked_of(path: str, rows: Mapping[str, int]) -> int | None:
    """How many rows of the table at this path a lookup asks for; None: nobody has said."""
    return next((num for pattern, num in rows.items() if path_matches(path, pattern)), None)


class ImaginedIds(Reading):
    """The answers of a lookup whose ids have no values: as many rows of each rank, and all ranks
    ask alike.

    Args:
        num_rows: of the table.
        num_asked: how many rows a lookup asks for; None: each id is another's row.
    """

    def __init__(self, num_rows: int, num_asked: int | None):
        self._num_rows, self._num_asked = num_rows, num_asked

    def ask(self, ids: Tensor, rows_per_rank: int, num_ranks: int) -> tuple[Asked, Tensor]:
        k = min(ids.numel() if self._num_asked is None else self._num_asked, self._num_rows)
        counts = [(k + rank) // num_ranks for rank in range(num_ranks)]
        wanted = ids.new_empty(k, dtype=torch.int64)
        return Asked(wanted, counts, wanted.new_empty(num_ranks)), torch.zeros_like(ids)

    def outside(self, ids: Tensor, num_rows: int) -> int | None:
        return None

    def number_of(self, row: int, asked: Asked) -> int | None:
        return None

    def counts_of_others(self, asked: Asked, group: Group) -> list[int]:
        ones = [1] * group.size
        group.all_to_all(torch.empty_like(asked.counts_beside), ones, asked.counts_beside, ones)
        return [asked.counts[group.rank]] * group.size


class AnnouncedFlats:
    """A unit's flats that say when the unit is in use. All else is asked of the flats."""

    def __init__(self, flats: UnitFlats, name: str, watch: MemoryWatch) -> None:
        self._flats, self._name, self._watch = flats, name, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flats, name)

    @property
    def here(self) -> list[Tensor] | None:
        if self._flats.here is not None:
            self._watch.unit = self._name  # whoever looks at gathered flats is using them
        return self._flats.here

    @here.setter
    def here(self, flats: list[Tensor] | None) -> None:
        self._flats.here = flats

    def unshard(self) -> list[Tensor]:
        self._watch.unit = self._name
        return self._flats.unshard()
