"""Which preset somebody means by a word that is the name of none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ONE_MACHINE = {"laptop", "notebook", "desktop", "pc", "mac", "macbook", "localhost", "single", "single-node", "none"}
FEW = 4  # presets that a line can name


def preset_meant(text: str, presets: Iterable[str]) -> str:
    """A hint, by a word for one machine, a part of names (`snellius`, `drac`) or letters alike; or nothing."""
    names, word = list(presets), text.lower()
    if word in ONE_MACHINE and "local" in names:
        return "One machine without a scheduler is the preset `local`."
    holding = [name for name in names if len(word) > 2 and word in name]
    if len(holding) > FEW:
        return f"`ddp-scaffold presets list {word}` lists those that have it in their names."
    close = holding or difflib.get_close_matches(text, names, n=1)
    return f"Did you mean {' or '.join(close)}?" if close else ""
