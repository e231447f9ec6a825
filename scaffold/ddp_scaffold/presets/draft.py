"""A preset file in the making: each value is checked against the schema before it goes in, whoever says it."""

from __future__ import annotations

import datetime
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from .load import find, load_preset
from .schema import Fact, Limit, Need, Preset, Text

NOT_KNOWN = "not known when this file was made"
ANSWERED = "answered when this file was made"


@dataclass
class Draft:
    """What is known so far. Facts are mappings, as the file will hold them."""

    name: str
    today: datetime.date
    title: str = ""
    extends: str = "local"
    keywords: list[str] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    limits: list[dict[str, Any]] = field(default_factory=list)
    storage: list[dict[str, Any]] = field(default_factory=list)
    needs: list[dict[str, Any]] = field(default_factory=list)
    not_found: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """Return the value of a field, or None if it is unknown or left open."""
        return self.facts.get(name, {}).get("value")

    def add(self, name: str, value: Any, source: str, confidence: str = "probed") -> None:
        """Take in a value. Raises ValueError, with the reason, if the schema does not allow it."""
        fact = {"value": value, "source": source, "confidence": confidence, "verified_on": self.today}
        lists = {"limits": (Fact[Limit], self.limits), "storage": (Fact[Text], self.storage)}
        kind: Any = lists[name][0] if name in lists else Preset.model_fields[name].annotation
        try:
            TypeAdapter(kind).validate_python(fact)
        except ValidationError as error:
            raise ValueError("; ".join(sorted({details["msg"] for details in error.errors()}))) from error
        if name in lists:
            lists[name][1].append(fact)
        else:
            self.facts[name] = fact

    def probed(self, name: str, value: Any, source: str, confidence: str = "probed") -> None:
        """Take in what a command printed, or say that it cannot be used."""
        try:
            self.add(name, value, source, confidence)
        except ValueError:
            self.missing(f"{name}: what {source} shows cannot be used")

    def need(self, value: dict[str, Any], source: str, confidence: str = "probed") -> None:
        """Take in who provides something that a job needs."""
        fact = {"value": value, "source": source, "confidence": confidence, "verified_on": self.today}
        TypeAdapter(Fact[Need]).validate_python(fact)
        self.needs.append(fact)

    def missing(self, line: str) -> None:
        """Note what was looked for in vain, once."""
        if line not in self.not_found:
            self.not_found.append(line)


class _Plain(yaml.SafeDumper):
    """Writes a day that stands there twice twice, instead of `&id001` and `*id001`."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def content(draft: Draft) -> str:
    """Return the text of the file."""
    ordered = {name: draft.facts[name] for name in Preset.model_fields if name in draft.facts}
    data = {
        "name": draft.name,
        "title": draft.title or draft.name,
        "extends": draft.extends,
        "keywords": draft.keywords,
        "verified_on": draft.today,
        "status": "community",
        **ordered,
        "storage": draft.storage,
        "limits": draft.limits,
        "needs": draft.needs and [*draft.needs, *_other_needs(draft)],
        "not_found": draft.not_found,
    }
    kept = {name: value for name, value in data.items() if value not in ([], None)}
    head = (
        f"# Made by `ddp-scaffold presets init` on {draft.today}. Correct what you know better, and its source too;\n"
        "# then `ddp-scaffold presets check` this file. What it leaves out comes from the preset that it extends.\n"
    )
    return head + yaml.dump(kept, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=116)


def _other_needs(draft: Draft) -> list[dict[str, Any]]:
    """Return what the preset that the draft extends says of other needs: a list takes the place of the one it has."""
    path = find(draft.extends)
    base = load_preset(path) if path else None
    known = {fact["value"]["what"] for fact in draft.needs}
    return [
        {**fact.model_dump(exclude_none=True), "verified_on": fact.verified_on or base.verified_on}
        for fact in (base.needs if base else [])
        if base and fact.value.what not in known
    ]


def write(draft: Draft, path: Path) -> Preset:
    """Write the file if it is a valid preset, and return the preset. Raises FileExistsError, OSError, PresetError."""
    text = content(draft)
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-preset-") as scratch:
        trial = Path(scratch, f"{draft.name}.yml")
        trial.write_text(text, encoding="utf-8")
        preset = load_preset(trial)
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:  # a full disk, Ctrl-C
            path.unlink()
            raise
    return preset
