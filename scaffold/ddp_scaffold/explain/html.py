"""An explanation as one page that needs nothing else: no network, no script but its own, dark and light.

A policy in the page forbids all loading; its one style sheet and its one script are named there by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

from .explanation import Explanation, RankRow
from .picture import draw, ranges

FEW = 32  # rows of the table that are shown at once; the others unfold

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --pale: #5f6368; --back: #fff; --line: #ddd; --mark: #b00020;
  --blamed: #fdecea; --halo: #fff; --track: #f3f4f6 }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --pale: #a6abb1; --back: #17191c; --line: #3a3f45;
  --mark: #ff8a80; --blamed: #3c1f22; --halo: #17191c; --track: #22262b } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  padding: 1.5rem 1rem 3rem; max-width: 1040px; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .5rem 0 } .pale, figcaption { color: var(--pale) } .kind { color: var(--mark) }
code { font: .87em/1.45 ui-monospace, monospace } ul { padding-left: 1.2rem } li { margin: .3rem 0 }
.wide { overflow-x: auto } figure { margin: 0 }
figure svg { user-select: none; min-width: 640px; width: 100%; display: block }
table { border-collapse: collapse; width: 100%; min-width: 560px } td, th { text-align: left; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); overflow-wrap: normal } tr.culprit { background: var(--blamed) }
button { font: inherit; padding: .1rem .7rem; margin-right: .3rem } .buttons { margin: .3rem 0 }
svg text { font: 12px system-ui, sans-serif; fill: var(--text) } svg .pale { fill: var(--pale) }
svg .track { fill: var(--track) } svg .blamed { fill: var(--blamed); stroke: var(--mark) }
svg .name-blamed { fill: var(--mark); font-weight: bold } svg .grid { stroke: var(--line) }
#bars { cursor: grab; touch-action: pan-y }
"""
SCRIPT = """
(() => {
  const bars = document.getElementById("bars");
  if (!bars) return;
  const [left, , width, height] = bars.getAttribute("viewBox").split(" ").map(Number);
  const ticks = [...document.querySelectorAll("[data-tick]")], scale = Number(bars.dataset.seconds) / width;
  let from = left, span = width, held = null;
  const show = () => {
    span = Math.min(Math.max(span, width / 5000), width);
    from = Math.min(Math.max(from, left), left + width - span);
    bars.setAttribute("viewBox", [from, 0, span, height].join(" "));
    const digits = Math.max(0, Math.min(6, Math.ceil(1 - Math.log10(span * scale / 5))));
    for (const tick of ticks)
      tick.textContent = ((from - left + span * tick.dataset.tick) * scale).toFixed(digits) + " s";
  };
  const zoom = (factor, share) => { from += span * share * (1 - factor); span *= factor; show(); };
  // of the pane behind the bars: the box of an inner svg grows with what is outside its view
  const pane = document.getElementById("pane");
  const share = event => (event.clientX - pane.getBoundingClientRect().left) / pane.getBoundingClientRect().width;
  bars.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault(); zoom(event.deltaY < 0 ? 0.8 : 1.25, share(event));
  }, { passive: false });
  bars.addEventListener("pointerdown", event => { held = share(event); bars.setPointerCapture(event.pointerId); });
  bars.addEventListener("pointerup", () => { held = null; });
  bars.addEventListener("pointercancel", () => { held = null; });
  bars.addEventListener("pointermove", event => {
    if (held === null) return;
    from += (held - share(event)) * span; held = share(event); show();
  });
  const acts = { in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), left: () => { from -= span / 4; show(); },
    right: () => { from += span / 4; show(); }, all: () => { from = left; span = width; show(); } };
  for (const button of document.querySelectorAll("button")) button.addEventListener("click", acts[button.dataset.act]);
})();
"""
BUTTONS = (("in", "Zoom in"), ("out", "Zoom out"), ("left", "Earlier"), ("right", "Later"), ("all", "All"))


def render(explanation: Explanation) -> str:
    """Return the page. All text of the input is escaped, and characters that are not to be seen are replaced."""
    verdict = explanation.verdict
    policy = f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; base-uri 'none'"
    who = "not known" if verdict.first_ranks is None else f"rank {ranges(verdict.first_ranks)}"
    who = who if verdict.first_ranks or verdict.first_ranks is None else "none"
    facts = f"First: {_text(who)}. Confidence: {_text(verdict.confidence)}."
    facts += f" Phase: {_text(verdict.phase)}." if verdict.phase else ""
    parts = [
        f'<h1><span class="kind">{_text(verdict.kind)}</span>: {_text(verdict.summary)}</h1>',
        f'<p class="pale">{facts}</p>',
        _list("What to do", [_text(each) for each in verdict.advice]),
        _picture(explanation),
        _list("Evidence", [_evidence(each.file, each.line, each.text) for each in verdict.evidence]),
        _list("Needed to say more", [_text(each) for each in verdict.needs]),
        _table(explanation.ranks),
        _list("Read", [f"<code>{_text(each)}</code>" for each in explanation.sources[:FEW]]),
    ]
    more = len(explanation.sources) - FEW
    parts.append(f'<p class="pale">and {more} more files</p>' if more > 0 else "")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(verdict.kind)}: {_text(who)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(value: object) -> str:
    """Escape, and show what is not printable (controls, marks that turn the direction of text) as U+FFFD."""
    return escape("".join(each if each.isprintable() else "\ufffd" for each in " ".join(str(value).split())))


def _list(title: str, items: list[str]) -> str:
    inner = "".join(f"<li>{item}</li>" for item in items)
    return f"<h2>{title}</h2><ul>{inner}</ul>" if items else ""


def _evidence(file: str, line: int, text: str) -> str:
    where = f"{file}:{line}" if line else file
    return f'<code>{_text(text)}</code><br><span class="pale">{_text(where)}</span>'


def _picture(explanation: Explanation) -> str:
    if not explanation.timeline:
        return ""
    buttons = "".join(f'<button type="button" data-act="{act}">{name}</button>' for act, name in BUTTONS)
    caption = (
        "A row a rank, time across, hatched where a rank waits for others. Ranks of whole nodes that do the same are "
        "one row, drawn as the first of them is. Drag to move; Ctrl and the wheel zoom."
    )
    figure = f'<div class="wide">{draw(explanation, _text)}</div><figcaption>{caption}</figcaption>'
    return f'<h2>Who did what, and when</h2><div class="buttons">{buttons}</div><figure>{figure}</figure>'


def _table(rows: tuple[RankRow, ...]) -> str:
    if not rows:
        return ""
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in ("rank", "role", "host", "phase", "collective", "exit"))
    ordered = sorted(rows, key=lambda row: (row.role != "culprit", row.rank))
    found = [
        f"<tr{' class=culprit' if row.role == 'culprit' else ''}>"
        + "".join(
            f"<td>{_text(value)}</td>" for value in (row.rank, row.role, row.host, row.phase, row.collective, row.exit)
        )
        + "</tr>"
        for row in ordered
    ]
    table = f'<div class="wide"><table>{head}</tr>{"".join(found[:FEW])}</table></div>'
    if len(found) > FEW:
        rest = f'<div class="wide"><table>{head}</tr>{"".join(found[FEW:])}</table></div>'
        table += f"<details><summary>{len(found) - FEW} more ranks</summary>{rest}</details>"
    return f"<h2>Ranks</h2>{table}"
