"""Tables: as text, and with bars of bytes by kind, which a notebook shows in its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple

COLORS = {  # by the kind of memory; each can be read on white and on black
    "params": "#1769aa",
    "optimizer state": "#e08a1e",
    "gradients": "#5a9e4b",
    "gathered params": "#b0b0b0",
    "activations, temporaries": "#8d6bb0",
    "other tensors": "#c2554d",
}
_SWATCH = "display: inline-block; height: 0.9em; background:"


def align(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Rows of cells as lines. The columns of these numbers go to the right, the others to the
    left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for n, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if n in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


class Bar(NamedTuple):
    """A row of such a table."""

    cells: tuple[str, ...]
    nbytes: Mapping[str, int]  # by kind, of `COLORS`: the parts of its bar


def table_html(title: str, head: Sequence[str], bars: Sequence[Bar], *, text: str) -> str:
    """The table in HTML, without scripts or styles of its own, so that any notebook shows it.

    Args:
        head: a name per cell.
        bars: drawn to one scale. Each part of a bar gives its bytes as a title.
        text: the object's own, which unfolds below.
    """
    longest = max((sum(bar.nbytes.values()) for bar in bars), default=0) or 1
    kinds = [kind for kind in COLORS if any(bar.nbytes.get(kind) for bar in bars)]
    legend = " &#160; ".join(
        f'<span style="white-space: nowrap">{_swatch(kind, "0.9em")} {escape(kind)}</span>'
        for kind in kinds
    )
    rows = "".join(_row("td", bar.cells, _bar(bar, longest)) for bar in bars)
    return (
        f'<div style="overflow-x: auto"><p><b>{escape(title)}</b></p>'
        f"<table><thead>{_row('th', head, '')}</thead><tbody>{rows}</tbody></table>"
        f"<p>{legend}</p>"
        f"<details><summary>in numbers</summary><pre>{escape(text)}</pre></details></div>"
    )


def _row(tag: str, cells: Sequence[str], bar: str) -> str:
    # On a phone the first cell, a name, gets narrow, so that bars can be seen
    whole = "; white-space: nowrap"
    texts = [
        f'<{tag} style="text-align: left; padding-right: 1em{whole if i else ""}">'
        f"{escape(cell)}</{tag}>"
        for i, cell in enumerate(cells)
    ]
    return f'<tr>{"".join(texts)}<{tag} style="min-width: 9em; width: 60%">{bar}</{tag}></tr>'


def _bar(bar: Bar, longest: int) -> str:
    swatches = []
    for kind, nbytes in bar.nbytes.items():
        width = f"{100 * nbytes / longest:.2f}%"
        swatches.append(_swatch(kind, width, title=f"{kind}: {nbytes:,} bytes"))
    return f'<div style="white-space: nowrap">{"".join(swatches)}</div>'


def _swatch(kind: str, width: str, title: str = "") -> str:
    named = f' title="{escape(title)}"' if title else ""
    return f'<span style="{_SWATCH} {COLORS[kind]}; width: {width}"{named}></span>'
