"""A line chart as SVG text: enough to see whether a run learns, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 280, 64, 36, 28
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")
Points = Sequence[tuple[float, float]]


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
            body.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            body.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
        body.append(f'<text x="{LEFT}" y="{HEIGHT - 10}">step {first:g}</text>')
        body.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 10}" text-anchor="end">step {last:g}</text>')
        for index, (name, points) in enumerate(present.items()):
            colour = COLOURS[index % len(COLOURS)]
            path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in points))
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            body.append(f'<text x="{LEFT + 8 + 110 * index}" y="18" fill="{colour}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(body)}</svg>\n'
    )
