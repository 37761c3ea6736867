"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .records import Collective

if TYPE_CHECKING:
    from .report import Plan

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def bytes_text(nbytes: float) -> str:
    """Bytes for people: decimal units, three digits or so.

    >>> bytes_text(31_400_000_000), bytes_text(999), bytes_text(0)
    ('31.4 GB', '999 B', '0 B')
    """
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def title_of(plan: Plan) -> str:
    """The level and the ranks."""
    level = "several levels" if plan.level is None else f"level {plan.level}"
    return f"{level}, {plan.num_ranks} ranks"


def format_plan(plan: Plan) -> str:
    """The plan's memory and its collectives, those alike in one line."""
    peak = plan.peak
    kinds = ["params", "gradients", "state", "buffers", "gathered"]
    rows = [[kind, bytes_text(getattr(plan, kind))] for kind in kinds]
    if plan.traced:
        rows.append(["activations", bytes_text(plan.activations)])
    rows.append(["peak", f"{bytes_text(peak.total)} at {peak.moment}"])
    head = f"{title_of(plan)}, {plan.num_params:,} params; of rank {plan.rank}:"
    parts = [head, "\n".join(f"  {name:12s} {value}" for name, value in rows)]
    if plan.balance is not None:
        parts.append(
            f"  owners of {len(plan.balance.leaves)} leaves: the busiest has {plan.balance.imbalance:.2f} of the mean"
        )
    return "\n".join([*parts, "a step's collectives:", format_collectives(plan.collectives)])


def format_collectives(collectives: Sequence[Collective]) -> str:
    """One line for all calls of a phase, kind and dtype."""
    rows = [["phase", "kind", "dtype", "calls", "bytes", "sent"]]
    grouped: dict[tuple[str, str, str], list[Collective]] = {}
    for c in collectives:
        grouped.setdefault((c.phase, c.kind, str(c.dtype).removeprefix("torch.")), []).append(c)
    for key, calls in grouped.items():
        sizes = (bytes_text(sum(c.nbytes for c in calls)), bytes_text(sum(c.sent_bytes for c in calls)))
        rows.append([*key, str(len(calls)), *sizes])
    total = bytes_text(sum(c.sent_bytes for c in collectives))
    rows.append(["total", "", "", str(len(collectives)), "", total])
    return "\n".join("  " + line for line in align(rows).splitlines())
