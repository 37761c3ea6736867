"""Draw what `peers.py` printed: `python tests/benchmarks/draw_peers.py docs/reference/peers.svg
small.md medium.md`.

Each file holds the output of one run; its name without the ending is the panel's title. Two columns
of bars, step time and peak memory of a rank; this library's rows (in bold there) stand out. Nothing
but the standard library is needed.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path
from typing import NamedTuple

COLUMNS = {"step ms": "step, ms", "peak MB": "peak memory of a rank, MB"}
ROW, LEFT, WIDTH, GAP = 18, 210, 250, 60  # pixels
STYLE = """svg { background: #fff } text { font: 11px sans-serif; fill: #333 }
.title { font-weight: bold }
.ours { fill: #1769aa } .peer { fill: #b0b0b0 } @media (prefers-color-scheme: dark) {
svg { background: #1b1b1b } text { fill: #ddd } .ours { fill: #4aa3e0 } .peer { fill: #777 } }"""


class Row(NamedTuple):
    """One contender."""

    label: str
    ours: bool
    values: dict[str, float]  # by column; what was not measured is missing


def read(text: str) -> list[Row]:
    """The rows of the first table that has the columns."""
    rows: list[Row] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if rows:
                break
            head = []
        elif not head:
            head = cells if set(COLUMNS) <= set(cells) else []
        elif not cells[1].startswith("---"):
            found = {name: cells[head.index(name)] for name in COLUMNS}
            values = {name: float(cell) for name, cell in found.items() if cell != "-"}
            rows.append(Row(cells[0].replace("*", "").replace("`", ""), "**" in cells[0], values))
    if not rows:
        raise ValueError(
            f"expected a table with the columns {', '.join(COLUMNS)}, as peers.py prints it"
        )
    return rows


def draw(panels: dict[str, list[Row]]) -> str:
    """An SVG with the panels below each other."""
    body, top = [], 20
    for title, rows in panels.items():
        body.append(f'<text class="title" x="4" y="{top}">{escape(title)}</text>')
        for k, (column, name) in enumerate(COLUMNS.items()):
            left = LEFT + k * (WIDTH + GAP)
            most = max((row.values.get(column, 0.0) for row in rows), default=0.0) or 1.0
            body.append(f'<text class="title" x="{left}" y="{top}">{escape(name)}</text>')
            for i, row in enumerate(rows):
                y = top + 8 + i * ROW
                if k == 0:
                    body.append(f'<text x="4" y="{y + 11}">{escape(row.label)}</text>')
                if column in row.values:
                    value = row.values[column]
                    kind = "ours" if row.ours else "peer"
                    body.append(
                        f'<rect class="{kind}" x="{left}" y="{y}" '
                        f'width="{WIDTH * value / most:.1f}" height="13"/>'
                    )
                    body.append(
                        f'<text x="{left + WIDTH * value / most + 4:.1f}" '
                        f'y="{y + 11}">{value:g}</text>'
                    )
        top += ROW * len(rows) + 44
    size = f'width="{LEFT + 2 * (WIDTH + GAP)}" height="{top - 16}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("printed", type=Path, nargs="+", help="files with what peers.py printed")
    args = parser.parse_args()
    args.out.write_text(draw({path.stem: read(path.read_text()) for path in args.printed}))


if __name__ == "__main__":
    main()
