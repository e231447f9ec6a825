"""Ranks down, time across, a colour a phase: colours and words are those of a generated project's timeline.svg."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .explanation import Explanation, RankRow, Span

WIDTH, LEFT, RIGHT, TOP = 1000, 196, 24, 8
PLOT = WIDTH - LEFT - RIGHT
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
    "no word": "#eceff1",
    "collective": "#56b4e9",
}
GUARD, WAIT, OTHER = "#d55e00", "#80868b", "#a0522d"
SINGLE = 16  # ranks that all get a row of their own
MOST = 24  # rows, above which nodes side by side that are alike become one
ALIKE = 0.12  # share of the time in which two ranks may differ that are drawn as one
MOST_SPANS = 4_000  # of one row; older ones are left out
Text = Callable[[object], str]


@dataclass(frozen=True)
class Lane:
    """A rank and its spans."""

    row: RankRow
    spans: tuple[Span, ...]
    shares: dict[tuple[int, str, bool], float]  # of the time, in each eighth of it and each phase

    @property
    def blamed(self) -> bool:
        """Whether this rank failed first."""
        return self.row.role == "culprit"


Band = tuple[Lane, ...]  # ranks that are one row, drawn as the first of them


def ranges(ranks: Iterable[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2, 5"."""
    ordered = sorted(set(ranks))
    starts = [0, *(at for at, (one, other) in enumerate(pairwise(ordered), 1) if other != one + 1)]
    runs = [ordered[begin:end] for begin, end in zip(starts, [*starts[1:], len(ordered)], strict=True)]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run)


def bands(explanation: Explanation) -> list[Band]:
    """Return the rows: each rank alone up to `SINGLE`; beyond, what is alike in a node, and nodes side by side."""
    first, last = window(explanation.timeline)
    spans: dict[int, list[Span]] = {}
    for span in explanation.timeline:
        spans.setdefault(span.rank, []).append(span)
    rows = {row.rank: row for row in explanation.ranks}
    lanes = []
    for rank in sorted({*rows, *spans}):
        own = sorted(spans.get(rank, ()), key=lambda span: span.start)[-MOST_SPANS:]
        lanes.append(Lane(rows.get(rank, RankRow(rank, "no sign")), tuple(own), _shares(own, first, last)))
    found: list[Band] = [(lane,) for lane in lanes]
    if len(found) <= SINGLE:
        return found
    found = _folded(found, lambda one, other: one.row.host == other.row.host and _alike(one, other))
    return found if len(found) <= MOST else _folded(found, _alike)


def window(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the first and the last moment, at least a millisecond apart."""
    first, last = min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)
    return first, max(last, first + 0.001)


def _shares(spans: Sequence[Span], first: float, last: float, parts: int = 8) -> dict[tuple[int, str, bool], float]:
    part_s = (last - first) / parts
    found: dict[tuple[int, str, bool], float] = {}
    for span in spans:
        for part in range(int((span.start - first) / part_s), min(int((span.end - first) / part_s), parts - 1) + 1):
            inside = min(span.end, first + (part + 1) * part_s) - max(span.start, first + part * part_s)
            key = (part, span.phase, span.waiting)
            found[key] = found.get(key, 0.0) + max(inside, 0.0) / (last - first)
    return found


def _alike(one: Lane, other: Lane) -> bool:
    """Whether both have the same part in the failure, end in the same place and spent each eighth of the time alike."""
    ends = [
        (
            lane.row.role,
            lane.row.exit,
            lane.spans and (lane.spans[-1].phase, lane.spans[-1].waiting, lane.spans[-1].label),
        )
        for lane in (one, other)
    ]
    apart = sum(abs(one.shares.get(key, 0.0) - other.shares.get(key, 0.0)) for key in {*one.shares, *other.shares})
    return ends[0] == ends[1] and apart / 2 < ALIKE


def _folded(found: Sequence[Band], alike: Callable[[Lane, Lane], bool]) -> list[Band]:
    """Join what stands side by side and is alike; who is to blame stays alone."""
    joined: list[Band] = []
    for band in found:
        if joined and not joined[-1][0].blamed and not band[0].blamed and alike(joined[-1][0], band[0]):
            joined[-1] += band
        else:
            joined.append(band)
    return joined


def colour_of(phase: str) -> str:
    """Return the colour of a phase: work of rank 0 alone stands out, waiting recedes."""
    if phase.startswith("guard:"):
        return GUARD
    return WAIT if phase.startswith(("wait:", "agree", "shutdown")) else COLOURS.get(phase, OTHER)


def draw(explanation: Explanation, text: Text) -> str:
    """Return the picture as SVG. `text` escapes what comes from the input."""
    drawn, (first, last) = bands(explanation), window(explanation.timeline)
    height = 26 if len(drawn) <= SINGLE else 18
    bottom = TOP + height * len(drawn)
    phases = list(dict.fromkeys(span.phase for band in drawn for span in band[0].spans))
    inner, names = [], []
    for number, band in enumerate(drawn):
        top, lane = TOP + height * number, band[0]
        blamed = ' class="blamed" stroke-width="1.5"' if lane.blamed else ' class="track"'
        names.append(f'<rect x="4" y="{top + 1}" width="{WIDTH - 8}" height="{height - 2}" rx="3"{blamed}/>')
        mark, name = ("▶ ", ' class="name-blamed"') if lane.blamed else ("", "")
        label = f"{mark}{_label(band)}{'  ✕' if lane.row.exit else ''}"
        names.append(f'<text x="{LEFT - 10}" y="{top + height / 2 + 4}" text-anchor="end"{name}>{text(label)}</text>')
        inner += [_bar(span, phases, (first, last), height * number, height, text) for span in lane.spans]
    waits = next((phases.index(span.phase) for band in drawn for span in band[0].spans if span.waiting), None)
    legend, end = _legend(phases, waits, bottom + 48, text)
    view = f'viewBox="0 0 {PLOT} {bottom - TOP}" preserveAspectRatio="none"'
    pane = f'<rect id="pane" x="{LEFT}" y="{TOP}" width="{PLOT}" height="{bottom - TOP}" fill="none"/>'
    bars = f'{pane}<svg id="bars" x="{LEFT}" y="{TOP}" width="{PLOT}" height="{bottom - TOP}" {view}'
    bars += f' data-seconds="{last - first:.6f}"><rect width="{PLOT}" height="{bottom - TOP}" fill="transparent"/>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {end + 12}" role="img" aria-label="{text(_told(drawn))}">{_hatches(phases)}'
        f"{''.join(names)}{bars}{''.join(inner)}</svg>{_axis(last - first, bottom)}{legend}</svg>"
    )


def _bar(span: Span, phases: list[str], times: tuple[float, float], top: float, height: float, text: Text) -> str:
    scale = PLOT / (times[1] - times[0])
    x, wide = (span.start - times[0]) * scale, max((span.end - span.start) * scale, 0.01)
    fill = f"url(#waits{phases.index(span.phase)})" if span.waiting else colour_of(span.phase)
    what = f"{span.phase}{', waits for others' if span.waiting else ''}{f': {span.label}' if span.label else ''}"
    title = f"<title>{text(f'{what}, {span.end - span.start:.3g} s')}</title>"
    place = f'x="{x:.3f}" y="{top + 3}" width="{wide:.3f}" height="{height - 6}"'
    return f'<rect {place} fill="{fill}">{title}</rect>'


def _label(band: Band) -> str:
    ranks, hosts = [lane.row.rank for lane in band], list(dict.fromkeys(lane.row.host for lane in band))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes"
    said = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
    return _short(said, 22) + (f" ({_short(where, 14)})" if where else "")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _hatches(phases: Sequence[str]) -> str:
    found = []
    for number, phase in enumerate(phases):
        colour = WAIT if phase in ("train", "init") else colour_of(phase)
        size = 'width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
        inner = f'<rect width="7" height="7" fill="{colour}" fill-opacity="0.16"/>'
        inner += f'<line x1="0" y1="0" x2="0" y2="7" stroke="{colour}" stroke-width="3" stroke-opacity="0.7"/>'
        found.append(f'<pattern id="waits{number}" {size}>{inner}</pattern>')
    return f"<defs>{''.join(found)}</defs>"


def _axis(seconds: float, bottom: float) -> str:
    digits = 0 if seconds > 50 else 1 if seconds > 5 else 3
    found = []
    for part in range(6):
        x = LEFT + PLOT * part / 5
        anchor = "start" if part == 0 else "end" if part == 5 else "middle"
        found.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 6}"/>')
        at = f"{seconds * part / 5:.{digits}f} s"
        place = f'x="{x}" y="{bottom + 20}" text-anchor="{anchor}"'
        found.append(f'<text class="pale" data-tick="{part / 5}" {place}>{at}</text>')
    return "".join(found)


def _legend(phases: Sequence[str], waits: int | None, top: float, text: Text) -> tuple[str, float]:
    boxes = [(_short(phase, 40), colour_of(phase)) for phase in phases[:40]]
    boxes += [("waits for other ranks", f"url(#waits{waits})")] if waits is not None else []
    found, x = [], 20.0
    for name, fill in boxes:
        wide = 34 + 6.6 * len(name)
        if x + wide > WIDTH - 20:
            x, top = 20.0, top + 20
        found.append(f'<rect x="{x}" y="{top - 10}" width="16" height="12" fill="{fill}"/>')
        found.append(f'<text x="{x + 21}" y="{top}">{text(name)}</text>')
        x += wide
    return "".join(found), top


def _told(drawn: Sequence[Band]) -> str:
    """For those who do not see it: where each row is at the end."""
    texts = []
    for band in drawn[:32]:
        lane = band[0]
        last = lane.spans[-1] if lane.spans else None
        what = "left no word" if last is None else f"{'waits' if last.waiting else 'is'} in {last.phase}"
        texts.append(f"{_label(band)} {what}{', to blame' if lane.blamed else ''}")
    return "At the end: " + "; ".join(texts)
