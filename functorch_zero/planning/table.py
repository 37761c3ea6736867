"""Numbers of bytes, tables and collectives as text."""

from __future__ import annotations

from collections.abc import Sequence

from .records import Collective

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
