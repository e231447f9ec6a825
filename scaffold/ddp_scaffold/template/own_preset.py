"""A preset in a file of the user's own: `--preset FILE`, or recorded among the answers of a project.

The template takes it as two answers: `preset` is `own`, and `preset_file` is what the file holds.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..presets.schema import OWN as OWN
from .given import Given

ANSWER = "preset_file"  # the question that takes its content


def is_file(preset: str) -> bool:
    """Tell whether what stands after --preset is a path: no preset of the template is named like one."""
    return preset.endswith((".yml", ".yaml")) or "/" in preset


def read(text: str, where: str) -> dict[str, Given]:
    """Return the two answers that a preset file stands for. Raises UsageError if it cannot be used."""
    path = Path(text).expanduser()
    if problem := problem_in(path):
        hint = f"See all problems with `ddp-scaffold presets check {shlex.quote(str(path))}`."
        raise UsageError(f"{where}: {problem}", hint)
    return {"preset": Given(OWN, where), ANSWER: Given(path.read_text(encoding="utf-8"), where, plain=False)}


def replace(recorded: Mapping[str, Given], given: Mapping[str, Given]) -> dict[str, Given]:
    """Return the recorded answers with those given over them; another preset takes the place of a recorded file."""
    if "preset" in given and given["preset"].text != OWN:
        recorded = {name: answer for name, answer in recorded.items() if name != ANSWER}
    return {**recorded, **given}


def problem_in(path: Path) -> str:
    """Return what is wrong with a preset file in one line, or an empty text."""
    from ..presets.load import PresetError, load_preset

    try:
        load_preset(path)
    except PresetError as error:
        return error.in_one_line()
    return ""


def check_recorded(preset: str, content: Any, given: Mapping[str, Given]) -> None:
    """Check a preset file that is given by its content. Raises UsageError if it is none, or if there is none at all."""
    import yaml

    if preset != OWN:
        return
    hint = "Pass --preset ./FILE.yml; `ddp-scaffold presets init NAME` makes one."
    if ANSWER not in given:
        raise UsageError(f"{given['preset'].where}: {OWN!r} names no preset file", hint)
    name = content.get("name") if isinstance(content, dict) else None
    if not isinstance(name, str) or is_file(name):
        raise UsageError(f"{given[ANSWER].where}: {ANSWER!r} is no preset: it has no name", hint)
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-preset-") as scratch:
        path = Path(scratch, f"{name}.yml")
        path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        if problem := problem_in(path):
            raise UsageError(f"{given[ANSWER].where}: {problem.removeprefix(f'{scratch}/')}", hint)
