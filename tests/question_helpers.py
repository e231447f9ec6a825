"""What the validators of the template's questions say, without rendering a project for each answer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

ROOT = Path(__file__).parents[1]


def refusal(name: str, value: Any, known: Mapping[str, Any], **others: Any) -> str:
    """Why an answer is refused, as copier asks the validator of its question; `known` is what the preset says.

    `others` are further answers.
    """
    data = {"title": "a place", **{fact: {"value": each, "source": "a page"} for fact, each in known.items()}}
    context = {"known": dict(known), "preset_data": data, "nodes": 2, "qos": "", **others, name: value}
    environment, questions = _template()
    return environment.from_string(questions[name]["validator"]).render(context).strip()


@cache
def _template() -> tuple[SandboxedEnvironment, dict[str, Any]]:
    """Jinja as copier has it, and the questions by name."""
    questions = {}
    for file in ("cluster", "kubernetes", "skypilot"):
        questions |= yaml.safe_load((ROOT / "templates/questions" / f"{file}.yml").read_text())
    options = yaml.safe_load((ROOT / "copier.yml").read_text().split("\n---\n")[0])["_envops"]
    options["undefined"] = StrictUndefined
    extensions = ["jinja2_ansible_filters.AnsibleCoreFiltersExtension"]
    return SandboxedEnvironment(loader=FileSystemLoader(ROOT), extensions=extensions, **options), questions
