"""What mkdocs does to each page: names and days in tables get a class, by which docs/css/site.css keeps them whole."""

from __future__ import annotations

import re
from typing import Any

CELL = re.compile(r"<t([dh])([^>]*)>(.*?)</t\1>", re.DOTALL)
NAME = re.compile(r"<code>([^\s<]+)</code>")  # not a command or a message: they have spaces, at which they may break
DAY = re.compile(r"\d{4}-\d\d-\d\d")


def on_page_content(html: str, **_: Any) -> str:
    """Mark the names in the cells of a page's tables."""
    return CELL.sub(_marked, html)


def _marked(cell: re.Match[str]) -> str:
    kind, attributes, text = cell.groups()
    whole = ' class="name"' if DAY.fullmatch(text) else ""
    return f"<t{kind}{attributes}{whole}>{NAME.sub(_with_class, text)}</t{kind}>"


def _with_class(code: re.Match[str]) -> str:
    return f'<code class="name">{code[1]}</code>'
