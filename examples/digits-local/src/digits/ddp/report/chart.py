"""Charts as SVG text, without a plotting library: a line chart, and what other pictures share with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 280, 64, 36, 28
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")
GRID = "#ddd"
Points = Sequence[tuple[float, float]]


def element(name: str, text: str | None = None, **attributes: object) -> str:
    """One SVG element; `text` and values are escaped, and `_` in a name of an attribute stands for `-`."""
    given = "".join(f" {key.strip('_').replace('_', '-')}={quoteattr(str(each))}" for key, each in attributes.items())
    return f"<{name}{given}/>" if text is None else f"<{name}{given}>{escape(printable(text))}</{name}>"


def printable(text: str) -> str:
    """Without what XML may not contain, even escaped (https://www.w3.org/TR/xml/#charsets)."""
    return "".join(each if each.isprintable() else " " for each in text)


def document(width: float, height: float, body: Iterable[str], title: str = "", description: str = "") -> str:
    """A picture with a background of its own: it is shown on white and on black pages.

    `title` and `description` are what a screen reader says.
    """
    spoken = element("title", title) + element("desc", description) if title else ""
    role = ' role="img"' if title else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"{role} '
        f'font-family="sans-serif" font-size="12">{spoken}'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(body)}</svg>\n'
    )


def line_chart(series: Mapping[str, Points]) -> str:
    """One line a series of (step, value), on a logarithmic value axis when all values are positive."""
    present = {name: points for name, points in series.items() if points}
    values = [value for points in present.values() for _, value in points]
    steps = [step for points in present.values() for step, _ in points]
    body: list[str] = []
    if values:
        log_axis = min(values) > 0
        scale = math.log10 if log_axis else float
        low, high = scale(min(values)), scale(max(values))
        first, last = min(steps), max(steps)

        def at(step: float, value: float) -> tuple[float, float]:
            x = LEFT + (WIDTH - LEFT - 12) * (step - first) / ((last - first) or 1)
            y = TOP + (HEIGHT - TOP - BOTTOM) * (high - scale(value)) / ((high - low) or 1)
            return round(x, 1), round(y, 1)

        for part in range(5):
            level = low + (high - low) * part / 4
            value = 10**level if log_axis else level
            y = at(first, value)[1]
            body.append(element("line", x1=LEFT, x2=WIDTH - 12, y1=y, y2=y, stroke=GRID))
            body.append(element("text", f"{value:.3g}", x=LEFT - 6, y=y + 4, text_anchor="end"))
        body.append(element("text", f"step {first:g}", x=LEFT, y=HEIGHT - 10))
        body.append(element("text", f"step {last:g}", x=WIDTH - 12, y=HEIGHT - 10, text_anchor="end"))
        for index, (name, points) in enumerate(present.items()):
            colour = COLOURS[index % len(COLOURS)]
            path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in points))
            body.append(element("polyline", points=path, fill="none", stroke=colour, stroke_width=2))
            body.append(element("text", name, x=LEFT + 8 + 110 * index, y=18, fill=colour))
    return document(WIDTH, HEIGHT, body)
