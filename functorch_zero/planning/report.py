"""`Plan`: what a sharded step will hold and send, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .picture import draw
from .records import Balance, Collective, Sample, highest
from .table import bytes_text, format_collectives


@dataclass(frozen=True)
class Plan:
    """What one rank holds between steps, what it sends in a step, and when its memory is highest. Bytes.

    Print it for a table; `to_json` has everything; `draw` makes a picture.

    Attributes:
        level: 0 to 3; None where leaves may differ in it.
        num_ranks: the ranks.
        rank: whose plan this is; ranks differ only in the leaves they own and in what of partial buckets is theirs.
        num_params: elements of all leaves.
        params, gradients, state: a rank's, between steps; gradients: reduced ones, from backward to update.
        gathered: the most there is of gathered params at a time.
        buffers: a model's buffers, on every rank.
        samples: memory from unit to unit, in the order of a step in its steady state.
        collectives: all of a step, in order.
        balance: of the owners, where the optimizer has whole-leaf parts.
        traced: whether a sample batch was run; if not, there are no activations in it and the order of units is the
            layout's.
        assumed: how many yes-no questions about values the step asked on the host; answered with yes.
    """

    level: int | None
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

    @property
    def peak(self) -> Sample:
        """The moment with most memory."""
        return highest(self.samples)

    @property
    def activations(self) -> int:
        """The most there is of activations at a time; 0 where no batch was run."""
        return max(sample.activations for sample in self.samples)

    @property
    def sent_bytes(self) -> float:
        """What a rank sends in a step at least, on a ring."""
        return sum(c.sent_bytes for c in self.collectives)

    def seconds(self, bandwidth: float) -> float:
        """The least time for a step's communication at so many bytes a second, out of each rank."""
        return self.sent_bytes / bandwidth

    def to_json(self) -> str:
        """Everything in the plan, as a JSON object."""
        return json.dumps(self._as_dict(), indent=1)

    def draw(self, path: str) -> None:
        """Draw one step's memory over its moments, stacked by kind, into a file. Needs matplotlib (extra `plot`)."""
        draw(self.samples, path, title=self._title)

    def __str__(self) -> str:
        peak = self.peak
        kinds = ["params", "gradients", "state", "buffers", "gathered"]
        rows = [[kind, bytes_text(getattr(self, kind))] for kind in kinds]
        if self.traced:
            rows.append(["activations", bytes_text(self.activations)])
        rows.append(["peak", f"{bytes_text(peak.total)} at {peak.moment}"])
        head = f"{self._title}, {self.num_params:,} params; of rank {self.rank}:"
        parts = [head, "\n".join(f"  {name:12s} {value}" for name, value in rows)]
        if (balance := self.balance) is not None:
            parts.append(
                f"  owners of {len(balance.leaves)} leaves: the busiest has {balance.imbalance:.2f} of the mean"
            )
        return "\n".join([*parts, "a step's collectives:", format_collectives(self.collectives)])

    @property
    def _title(self) -> str:
        level = "several levels" if self.level is None else f"level {self.level}"
        return f"{level}, {self.num_ranks} ranks"

    def _as_dict(self) -> dict[str, Any]:
        names = ("level", "num_ranks", "rank", "num_params", "params", "gradients", "state", "buffers", "gathered")
        peak = self.peak
        return {
            **{name: getattr(self, name) for name in (*names, "activations", "sent_bytes", "traced", "assumed")},
            "peak": {"bytes": peak.total, **peak._asdict()},
            "samples": [sample._asdict() for sample in self.samples],
            "collectives": [
                {**c._asdict(), "dtype": str(c.dtype).removeprefix("torch."), "bytes": c.nbytes}
                for c in self.collectives
            ],
            "balance": None if self.balance is None else _balance(self.balance),
        }


def _balance(balance: Balance) -> dict[str, Any]:
    return {"imbalance": balance.imbalance, "leaves": [leaf._asdict() for leaf in balance.leaves]}
