"""What a fast dev run changes: the same settings, made small, in a directory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLAG, FOLDER = "--fast-dev-run", "fast-dev-run"
EVAL_BATCHES = 2


def shortened(values: Mapping[str, Any], small: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """The settings (section, key) that a fast dev run has in the place of `values`; none if it is not asked for.

    Args:
        values: all settings, by section.
        small: numbers of the project's own, 'section.key' -> the most that it may be.
    """
    steps = (values.get("train") or {}).get("fast_dev_run", 0)
    if not steps:
        return {}
    folder = Path(values["run"]["dir"])
    wanted: dict[tuple[str, str], Any] = {
        ("run", "dir"): folder if folder.name == FOLDER else folder / FOLDER,  # a launch script has been here before
        ("run", "resume"): False,
        ("train", "steps"): steps,
        ("checkpoint", "every_steps"): max(1, steps // 2),  # one beside training, and the one at the end
        ("loader", "eval_batches"): EVAL_BATCHES,
        ("log", "every_steps"): 1,
        ("log", "tracker"): "none",
    }
    wanted |= {
        (section, "every_steps"): steps
        for section in ("eval", "sample")
        if (values.get(section) or {}).get("every_steps")  # 0 is never, also here
    }
    last = str((values.get("log") or {}).get("profile") or "").rpartition(":")[2].strip()
    if last.isdecimal() and int(last) > steps:
        wanted["log", "profile"] = ""  # of steps that it does not have
    for name, most in small.items():
        section, _, key = name.partition(".")
        now = (values.get(section) or {}).get(key)
        if isinstance(now, (int, float)):
            wanted[section, key] = min(now, most)
    return {(section, key): value for (section, key), value in wanted.items() if key in (values.get(section) or {})}
