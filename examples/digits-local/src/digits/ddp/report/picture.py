"""timeline.svg: ranks down, time across, one colour a phase; who held up the others is to be seen before it is read."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ranks import ranges
from .chart import GRID, document, element
from .sentence import clock_name, heard_of, phase_name, seconds, sentence, since, time_of_day, waits_in
from .timeline import NO_WORD, Row, Span, Timeline

WIDTH, LEFT, RIGHT = 1000, 196, 24
PLOT = WIDTH - LEFT - RIGHT
MARK, BLAMED, TEXT, PALE = "#b00020", "#fdecea", "#1a1a1a", "#5f6368"
# Distinct also for those who confuse red and green (Okabe and Ito, jfly.uni-koeln.de/color); greys for what is no work.
COLOURS = {
    "data": "#e69f00",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "optim": "#009e73",
    "eval": "#cc79a7",
    "log": "#b7a11f",
    "checkpoint": "#7b4ab0",
    "compile": "#8c6d46",
    "init": "#b4b9bf",
    "train": "#d3d7db",
    NO_WORD: "#eceff1",
}
GUARD, WAIT, OTHER = "#d55e00", "#80868b", "#a0522d"
HALO: dict[str, Any] = {"stroke": "white", "stroke_width": 3.5, "paint_order": "stroke", "stroke_linejoin": "round"}
SINGLE = 16  # ranks that all get a row of their own
MOST = 24  # rows, above which nodes side by side that are alike become one
ALIKE = 0.12  # share of the time in which two ranks may differ that are drawn as one
ROUND = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)  # seconds between ticks
Key = tuple[str, bool]  # phase, and whether the rank waits in it


@dataclass(frozen=True)
class Band:
    """One row of the picture: a rank, or several that are alike, drawn as the first of them is."""

    rows: tuple[Row, ...]
    blamed: bool

    @property
    def label(self) -> str:
        """'rank 3 (n2)', 'ranks 8-15 (n2)', 'ranks 8-503 (62 nodes)'."""
        ranks, hosts = [row.rank for row in self.rows], list(dict.fromkeys(row.host for row in self.rows))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes"
        return _short(f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}", 22) + f" ({_short(where, 14)})"


def draw(timeline: Timeline, end: Mapping[str, Any]) -> str:
    """The picture as SVG text. `end` has the fields of outcome.json."""
    blamed = [rank for rank in end.get("first_ranks") or [] if rank < len(timeline.rows)]
    first, last = _window(timeline, blamed)
    bands = _bands(timeline, blamed, (first, last))
    height = 26 if len(bands) <= SINGLE else 18
    said = sentence(timeline, end)
    title = _lines(said)
    top = 34 + 22 * len(title) + 42

    def across(at: float) -> float:
        return round(LEFT + PLOT * (at - first) / (last - first), 1)

    bottom = top + height * len(bands)
    body = [_patterns({span.phase for band in bands for span in band.rows[0].spans})]
    for number, line in enumerate(title):
        body.append(element("text", line, x=20, y=32 + 22 * number, font_size=16, font_weight="bold", fill=TEXT))
    body.append(element("text", _about(timeline, end), x=20, y=30 + 22 * len(title), fill=PALE))
    body += _axis(timeline, first, last, across, top, bottom)
    shown: set[Key] = set()
    for number, band in enumerate(bands):
        drawn, keys = _band(band, (first, last), timeline.rang_at, top + height * number, height)
        body, shown = body + drawn, shown | keys
    body += _moment(timeline, end, across, top, bottom)
    legend, depth = _legend(shown, bottom + 44)
    body += legend
    body.append(element("text", _foot(timeline, bands), x=20, y=depth + 24, font_size=11, fill=PALE))
    return document(WIDTH, depth + 38, body, said, _description(timeline, bands))


def _lines(text: str) -> list[str]:
    """The title in lines of about equal length."""
    count = math.ceil(len(text) / 92)
    return textwrap.wrap(text, min(92, len(text) // count + 12))


def _window(timeline: Timeline, blamed: Sequence[int]) -> tuple[float, float]:
    """From when to when: what went wrong is most of it, and before it some steps, but not the start of the run."""
    rows = [row for row in timeline.rows if row.spans]
    if not rows:
        return timeline.rang_at - 1, timeline.rang_at
    last = max(timeline.rang_at, *(row.spans[-1].end for row in rows))
    involved = [row for row in rows if row.rank in blamed] or rows
    trouble = min(since(row) for row in [*involved, *(row for row in rows if waits_in(row))])
    took, before = last - trouble, last - min(_steps_before(row) for row in involved)
    first = last - max(1.4 * took, min(1.2 * before, 2.5 * took), 1.2 * min(before, 0.5), 0.01)
    started = max((span.end for row in rows for span in row.spans[:-1] if span.phase == "init"), default=first)
    first = max(first, started) if started < trouble else first
    return max(first, min(row.spans[0].begin for row in rows)), last + (last - first) * 0.02


def _steps_before(row: Row, steps: int = 5) -> float:
    """When this rank began the step so many steps before its last one."""
    step = row.spans[-1].step - steps
    return next(span.begin for span in row.spans if span.step >= step)


def _bands(timeline: Timeline, blamed: Sequence[int], window: tuple[float, float]) -> list[Band]:
    """Each rank alone, up to `SINGLE` of them; beyond, those of a node that are alike, and then nodes side by side."""
    if len(timeline.rows) <= SINGLE:
        return [Band((row,), row.rank in blamed) for row in timeline.rows]
    shares = {row.rank: _shares(row, window) for row in timeline.rows}

    def alike(one: Row, other: Row) -> bool:
        """Whether both are in the same place at the end, and spent each eighth of the time alike."""
        places = [(row.last and (row.last.phase, row.last.waits), row.call, row.ended) for row in (one, other)]
        mine, others = shares[one.rank], shares[other.rank]
        apart = sum(abs(mine.get(key, 0.0) - others.get(key, 0.0)) for key in {*mine, *others})
        return places[0] == places[1] and apart / 2 < ALIKE * (window[1] - window[0])

    bands = [Band((row,), row.rank in blamed) for row in timeline.rows]
    bands = _folded(bands, lambda one, other: one.host == other.host and alike(one, other))
    return bands if len(bands) <= MOST else _folded(bands, alike)


def _folded(bands: Sequence[Band], alike: Callable[[Row, Row], bool]) -> list[Band]:
    """Side by side, and none to blame: one band."""
    found: list[Band] = []
    for band in bands:
        if found and not found[-1].blamed and not band.blamed and alike(found[-1].rows[0], band.rows[0]):
            found[-1] = Band(found[-1].rows + band.rows, False)
        else:
            found.append(band)
    return found


def _shares(row: Row, window: tuple[float, float], parts: int = 8) -> dict[tuple[int, Key], float]:
    """Seconds in each phase, in each of the equal parts of the window."""
    first, last = window
    part_s = (last - first) / parts
    found: dict[tuple[int, Key], float] = {}
    for span in _inside(row.spans, window):
        for number in range(int((span.begin - first) / part_s), min(int((span.end - first) / part_s), parts) + 1):
            inside = min(span.end, first + (number + 1) * part_s) - max(span.begin, first + number * part_s)
            key = (number, (span.phase, span.waits))
            found[key] = found.get(key, 0.0) + max(inside, 0.0)
    return found


def _inside(spans: Iterable[Span], window: tuple[float, float]) -> Iterator[Span]:
    for span in spans:
        if span.end >= window[0] and span.begin <= window[1]:
            yield span._replace(begin=max(span.begin, window[0]), end=min(span.end, window[1]))


def _columns(row: Row, window: tuple[float, float]) -> list[tuple[int, int, Key]]:
    """Runs of equal pixels: from, to, what. Where phases are shorter than a pixel, it has that which took longest."""
    first, last = window
    scale = PLOT / (last - first)
    cover: list[dict[Key, float]] = [{} for _ in range(PLOT)]
    for span in _inside(row.spans, window):
        begin, end = (span.begin - first) * scale, (span.end - first) * scale
        for column in range(int(begin), min(PLOT, math.ceil(end))):
            share = min(end, column + 1) - max(begin, column)
            key = (span.phase, span.waits)
            cover[column][key] = cover[column].get(key, 0.0) + share
    runs: list[tuple[int, int, Key]] = []
    for column, parts in enumerate(cover):
        if not parts:
            continue
        key = max(parts, key=lambda each: parts[each])
        if runs and runs[-1][1] == column and runs[-1][2] == key:
            runs[-1] = (runs[-1][0], column + 1, key)
        else:
            runs.append((column, column + 1, key))
    return runs


def _band(
    band: Band, window: tuple[float, float], rang_at: float, top: float, height: float
) -> tuple[list[str], set[Key]]:
    row, middle, pad = band.rows[0], top + height / 2 + 4, 3
    colour, weight = (MARK, "bold") if band.blamed else (TEXT, "normal")
    around: dict[str, Any] = {"x": 12, "y": top + 0.5, "width": WIDTH - 24, "height": height - 1, "rx": 3}
    drawn = [element("rect", **around, fill=BLAMED, class_="blamed")] if band.blamed else []
    label = f"▶ {band.label}" if band.blamed else band.label
    drawn.append(element("text", label, x=LEFT - 10, y=middle, text_anchor="end", fill=colour, font_weight=weight))
    runs = _columns(row, window)
    for begin, end, (phase, waits) in runs:
        fill = f"url(#{_pattern(phase)})" if waits else colour_of(phase)
        inside: dict[str, Any] = {"x": LEFT + begin, "y": top + pad, "width": end - begin, "height": height - 2 * pad}
        drawn.append(element("rect", **inside, fill=fill))
    for run in runs:
        if run[1] - run[0] >= 70 and (text := _words(row, run, window, rang_at)):
            place: dict[str, Any] = {"x": LEFT + (run[0] + run[1]) / 2, "y": middle, "text_anchor": "middle"}
            drawn.append(element("text", text, **place, fill=TEXT, font_weight=weight, **HALO))
    if not row.spans:
        text = "left no word of what it did"
        drawn.append(element("text", text, x=LEFT + 8, y=middle, fill=PALE, font_style="italic"))
    if row.ended is not None and runs:
        x = LEFT + runs[-1][1] + 3
        drawn.append(element("text", "✕", x=x, y=middle, font_size=14, font_weight="bold", fill=MARK, class_="gone"))
    if band.blamed:
        drawn.append(element("rect", **around, fill="none", stroke=MARK, stroke_width=2))
    return drawn, {key for _, _, key in runs}


def _words(row: Row, run: tuple[int, int, Key], window: tuple[float, float], rang_at: float) -> str:
    """What this is and how long it took, inside it."""
    begin, end, (phase, waits) = run
    scale = (window[1] - window[0]) / PLOT
    middle = window[0] + (begin + end) / 2 * scale
    those = (each for each in row.spans if (each.phase, each.waits) == (phase, waits))
    span = next((each for each in those if each.begin <= middle <= each.end), None)
    if span is None:
        return ""
    waiting = f"waits {waits_in(row)}" if span is row.last else "waits"
    what = waiting if waits else phase_name(phase)
    took = seconds((min(span.end, max(rang_at, span.begin)) if span is row.last else span.end) - span.begin)
    return text if len(text := f"{what}, {took}") <= (end - begin) // 7 else took


def colour_of(phase: str) -> str:
    """Of a phase: work of rank 0 alone stands out, waiting recedes."""
    if phase.startswith("guard:"):
        return GUARD
    if phase.startswith(("wait:", "agree", "shutdown")):
        return WAIT
    return COLOURS.get(phase, OTHER)


def _pattern(phase: str) -> str:
    return "waits" + _of_lines(phase).removeprefix("#")


def _of_lines(phase: str) -> str:
    """The colour of a hatch: the greys of phases without work are too pale for lines."""
    return WAIT if phase in ("train", "init") else colour_of(phase)


def _patterns(phases: Iterable[str]) -> str:
    """A hatch for each colour: pale, with lines."""
    found = []
    for phase in sorted({_pattern(phase): phase for phase in phases}.values()):
        colour = _of_lines(phase)
        inner = element("rect", width=7, height=7, fill=colour, fill_opacity=0.16)
        inner += element("line", x1=0, y1=0, x2=0, y2=7, stroke=colour, stroke_width=3, stroke_opacity=0.7)
        size = 'width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
        found.append(f'<pattern id="{_pattern(phase)}" {size}>{inner}</pattern>')
    return f"<defs>{''.join(found)}</defs>"


def _axis(timeline: Timeline, first: float, last: float, across: Any, top: float, bottom: float) -> Iterator[str]:
    """Lines and times of day, at round seconds."""
    rough = (last - first) / 6
    step = next((each for each in ROUND if each >= rough), 86400)
    digits = max(0, -math.floor(math.log10(step))) if step < 1 else 0
    number = math.ceil((timeline.time + first) / step)
    while (at := number * step - timeline.time) <= last:
        x = across(at)
        yield element("line", x1=x, x2=x, y1=top, y2=bottom + 5, stroke=GRID)
        yield element("text", time_of_day(timeline, at, digits), x=x, y=bottom + 19, text_anchor="middle", fill=PALE)
        number += 1


def _moment(timeline: Timeline, end: Mapping[str, Any], across: Any, top: float, bottom: float) -> list[str]:
    """The line at which the clock rang, or the end began."""
    what = {"rank_exception": "the exception", "rank_killed": "the others noticed"}.get(str(end.get("kind")), "noticed")
    what = "the last sign of life" if timeline.silent else what
    clock = clock_name(timeline)
    text = f"{clock} (clocks.{timeline.clock}) rang" if clock else what
    x = across(timeline.rang_at)
    anchor = "end" if x > LEFT + PLOT / 2 else "start"
    label = f"{text}, {time_of_day(timeline, timeline.rang_at)}"
    return [
        element("line", x1=x, x2=x, y1=top - 12, y2=bottom, stroke=MARK, stroke_width=2, stroke_dasharray="6 3"),
        element("text", label, x=x, y=top - 17, text_anchor=anchor, fill=MARK, font_weight="bold", class_="clock"),
    ]


def _legend(shown: set[Key], top: float) -> tuple[list[str], float]:
    """A box for each phase and one for waiting; returns also where it ends."""
    known = list(COLOURS)
    order = sorted(phase for phase, waits in shown if not waits or phase in COLOURS)
    order.sort(key=lambda phase: known.index(phase) if phase in known else -1)
    boxes = [(name, fill) for name, fill in {phase_name(phase): colour_of(phase) for phase in order}.items()]
    hatch = next((f"url(#{_pattern(phase)})" for phase, waits in sorted(shown) if waits), "")
    boxes += [("waits for other ranks", hatch)] if hatch else []
    drawn, x = [], 20.0
    for name, fill in boxes:
        wide = 34 + 6.6 * len(name)
        if x + wide > WIDTH - 20:
            x, top = 20.0, top + 20
        drawn.append(element("rect", x=x, y=top - 10, width=16, height=12, fill=fill, stroke=PALE, stroke_width=0.5))
        drawn.append(element("text", name, x=x + 21, y=top, fill=TEXT))
        x += wide
    return drawn, top


def _about(timeline: Timeline, end: Mapping[str, Any]) -> str:
    hosts = len({row.host for row in timeline.rows})
    size = f"{len(timeline.rows)} rank{'s' * (len(timeline.rows) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    named = [timeline.rows[rank] for rank in end.get("first_ranks") or [] if rank < len(timeline.rows)]
    found = [row.last.step for row in named if row.last] if end.get("kind") == "rank_killed" else []
    step = max(found) if found else end.get("step", "?")  # of a killed rank, the outcome has that of its last heartbeat
    return f"{end.get('kind', '')}, step {step}; {size}, start {timeline.start} of the run"


def _foot(timeline: Timeline, bands: Sequence[Band]) -> str:
    text = "Time of day on the host that wrote this."
    if timeline.silent:
        text += " Made from the files that were left: what a rank did after its last heartbeat is not known."
    if timeline.spread_s is not None:
        text += f" Hosts are set equal to about {1000 * max(timeline.spread_s, 0.001):.0f} ms."
    if any(len(band.rows) > 1 for band in bands):
        text += " Ranks that did the same are one row, drawn as the first of them."
    return text


def _description(timeline: Timeline, bands: Sequence[Band]) -> str:
    """For those who do not see it: where each row is at the end."""
    texts = []
    for band in bands[:32]:
        row = band.rows[0]
        if timeline.silent:
            told = heard_of(row)
            texts.append(f"{band.label} was last heard of in {phase_name(told.phase)}" if told else f"{band.label}")
        elif row.last:
            what = f"waits {waits_in(row)}" if row.last.waits else f"is in {phase_name(row.last.phase)}"
            texts.append(f"{band.label} {what}{', to blame' if band.blamed else ''}")
    what = "Ranks down, time across, a colour for each phase, hatched where a rank waits for others"
    return f"{what}. At the end: {'; '.join(texts)}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
