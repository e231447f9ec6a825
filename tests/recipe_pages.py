"""The pages of docs/recipes/: their code, and how a project becomes what it says.

A block of code follows a line that names its file and what to do with it, which is how a reader knows, too:

    `train.py`:                               a diff, whose hunks are found by their lines; settings are merged
    `train.py`, in the place of `name`:       a function or class, with its imports at the top of the file
    `train.py`, above `name`:                 new, ahead of that function or class
    `prepare.py`, all of it:                  a file
    `sample.py`, without `name`.              a function that goes
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
GONE = re.compile(r"^`(?P<file>[^`]+)`, without `(?P<name>\w+)`\.$", re.MULTILINE)
LEAD = re.compile(r"^`(?P<file>[^`]+)`(?P<how>[^\n]*):\n\n\Z", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code, and the line ahead of it."""

    file: str
    how: str
    language: str
    body: str
    section: str


def blocks(page: str) -> list[Block]:
    """The code of a page, but for its commands."""
    text = (RECIPES / page).read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        if fence["language"] in ("bash", "text"):
            continue
        lead = LEAD.search(text, 0, fence.start())
        assert lead, f"{page}: no line says what to do with\n{fence['body']}"
        heading = re.findall(r"^##? (.*)", text[: fence.start()], re.MULTILINE)[-1]
        found.append(Block(lead["file"], lead["how"].strip(", "), fence["language"], fence["body"], heading))
    return found


def arguments(page: str) -> Iterator[list[str]]:
    """What each command of the page gives to the training."""
    text = (RECIPES / page).read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        if fence["language"] == "bash" and fence["body"].startswith("launch/torchrun.sh"):
            yield shlex.split(fence["body"].replace("\\\n", " "), comments=True)[1:]


def follow(page: str, project: Path, *sections: str) -> list[Path]:
    """Change `project` as the page says, or as these sections of it do. Returns what has changed."""
    (package,) = (path for path in (project / "src").iterdir() if (path / "train.py").exists())
    changed = []
    for block in blocks(page):
        if sections and block.section not in sections:
            continue
        at_root = "/" in block.file or block.file == "pyproject.toml"
        path = (project if at_root else package) / block.file
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(_changed(before, block), encoding="utf-8")
        changed.append(path)
    for gone in GONE.finditer((RECIPES / page).read_text(encoding="utf-8")):
        path = package / gone["file"]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        first, last = _lines_of("".join(lines), gone["name"])
        above, below = "".join(lines[:first]).rstrip(), "".join(lines[last:]).strip()
        path.write_text(f"{above}\n\n\n{below}".rstrip() + "\n", encoding="utf-8")
    assert changed, f"{page} has no code in {sections}"
    return changed


def _changed(before: str, block: Block) -> str:
    if block.how == "all of it":
        return block.body
    if block.language == "yaml":
        return yaml.safe_dump(_merged(yaml.safe_load(before) or {}, yaml.safe_load(block.body)))
    if block.language == "diff":
        return _patched(before, block)
    place = re.fullmatch(r"(in the place of|above) `(\w+)`", block.how)
    assert place, f"{block.file}, {block.how}: what is to be done?"
    first, last = _lines_of(before, place[2])
    imports, code = _apart(block.body)
    lines = before.splitlines(keepends=True)
    rest = lines[last:] if place[1] == "in the place of" else ["\n", "\n", *lines[first:]]
    return _with_imports("".join([*lines[:first], code, *rest]), imports)


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return old | {
        key: _merged(old.get(key) or {}, value) if isinstance(value, dict) else value for key, value in new.items()
    }


def _patched(before: str, block: Block) -> str:
    """Hunks stand apart by lines with @@; each must be found exactly once."""
    for hunk in re.split(r"^@@.*\n", block.body, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
        assert before.count(old) == 1, f"{block.file} has {before.count(old)} times\n{old}"
        before = before.replace(old, new)
    return before


def _lines_of(text: str, name: str) -> tuple[int, int]:
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            assert node.end_lineno
            return node.lineno - 1, node.end_lineno
    raise AssertionError(f"there is no {name}")


def _apart(code: str) -> tuple[list[str], str]:
    """The imports at the top of a block, and what follows them."""
    body = ast.parse(code).body
    count = next((place for place, node in enumerate(body) if not isinstance(node, (ast.Import, ast.ImportFrom))), 0)
    lines = code.splitlines(keepends=True)
    imports = [ast.unparse(node) for node in body[:count]]
    return imports, "".join(lines[body[count].lineno - 1 :]) if count else code


def _with_imports(text: str, imports: list[str]) -> str:
    """Below the last import of the file; ruff sorts them."""
    if not imports:
        return text
    last = max(node.end_lineno or 0 for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom)))
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:last], *(f"{line}\n" for line in imports), *lines[last:]])
