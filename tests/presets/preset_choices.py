"""Makes templates/questions/presets.yml, the choices of the question `preset`, from the preset files.

    python tests/presets/preset_choices.py

A test compares what it would write with what is there.
"""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "templates" / "questions" / "presets.yml"
HEAD = "# {what the wizard shows: name}, made from templates/presets by tests/presets/preset_choices.py; edit those.\n"


def choices() -> str:
    """This machine first, then clusters of any kind, then those with a name, by title; a file of one's own last."""
    presets = [yaml.safe_load(path.read_text()) for path in (ROOT / "templates" / "presets").glob("*.yml")]

    def place(preset: dict[str, str]) -> tuple[bool, bool, bool, str]:
        name = preset["name"]
        return (
            name != "local",
            name not in ("workstation", "cpu"),
            not name.startswith("generic"),
            preset["title"].lower(),
        )

    lines = [f"{yaml_text(preset['title'])}: {preset['name']}\n" for preset in sorted(presets, key=place)]
    return "".join([HEAD, *lines, '"A preset file of your own": own\n'])


def yaml_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


if __name__ == "__main__":
    FILE.write_text(choices())
