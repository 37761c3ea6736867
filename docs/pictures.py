"""A small SVG, for the scripts beside this file: text of 12 pixels on 400, so that a phone's width
shows it; on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from functorch_zero.sharded.drawing import COLORS

WIDTH = 400
BLUE, ORANGE, GREEN, GRAY = "#1769aa", "#e08a1e", "#5a9e4b", "#909090"
_STYLE = """text { font: 12px sans-serif; fill: #333 } .bold { font-weight: bold }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }"""


class Picture:
    """Parts in the order in which they are drawn. All numbers are pixels, from the top left."""

    def __init__(self, title: str):
        self._title = escape(title, quote=False)
        self._parts: list[str] = []
        self.height = 0.0  # of what is drawn so far
        self.text(4, 14, title, bold=True)

    def text(self, x: float, y: float, text: str, *, at: str = "start", bold: bool = False) -> None:
        """A line of text with its base line at y; `at` ("start", "middle", "end"): which of its
        points x is."""
        kind = ' class="bold"' if bold else ""
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        body = escape(text, quote=False)
        self._add(y + 4, f'<text{kind}{anchor} x="{x:.0f}" y="{y:.0f}">{body}</text>')

    def rect(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """A filled one. One too thin to see is left out."""
        if width >= 0.05 and height >= 0.05:
            size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            self._add(y + height, f'<rect fill="{color}" {size}/>')

    def line(self, points: Iterable[tuple[float, float]], color: str) -> None:
        """Through these points."""
        at = [*points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        style = f'fill="none" stroke="{color}" stroke-width="1.5"'
        self._add(max(y for _, y in at), f'<polyline {style} points="{path}"/>')

    def dots(self, points: Iterable[tuple[float, float]], color: str) -> None:
        """A small one at each point."""
        at = [*points]
        path = "".join(f"M{x:.1f},{y:.1f}h0" for x, y in at)
        style = f'stroke="{color}" stroke-width="3" stroke-linecap="round"'
        self._add(max(y for _, y in at) + 2, f'<path {style} d="{path}"/>')

    def legend(self, y: float, colors: dict[str, str], *, left: float = 4) -> None:
        """Each name beside its color, in as many lines as it takes."""
        x = left
        for name, color in colors.items():
            width = 26 + 7 * len(name)
            if x + width > WIDTH:
                x, y = left, y + 18
            self.rect(x, y, 11, 11, color)
            self.text(x + 16, y + 10, name)
            x += width

    def memory_legend(self, y: float, kinds: Sequence[str]) -> None:
        """Of these kinds of memory. Without a batch, a plan has no activations."""
        self.legend(y, {kind.removeprefix("activations, "): COLORS[kind] for kind in kinds})

    def _add(self, bottom: float, part: str) -> None:
        self.height = max(self.height, bottom)
        self._parts.append(part)

    def svg(self) -> str:
        """All of it."""
        height = round(self.height + 4)
        size = f'viewBox="0 0 {WIDTH} {height}" width="{1.3 * WIDTH:.0f}"'
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
        lines += [f"<title>{self._title}</title>", f"<style>{_STYLE}</style>"]
        return "\n".join([*lines, *self._parts, "</svg>"]) + "\n"
