"""The questions of `copier.yml`, and whether given answers fit them.

Copier takes unknown keys in silence and computed ones as overrides, so both are refused here, by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._errors import ScaffoldError, UsageError, show
from ..presets.meant import preset_meant
from . import own_preset
from .given import Given

LISTED = {"preset": "presets list"}
FEW = 40  # characters; choices that take more do not fit into a message


@dataclass(frozen=True)
class Question:
    """One entry of copier.yml."""

    name: str
    type: str
    default: Any  # None if there is none, else a value or a Jinja template
    choices: Mapping[str, str]  # each with its text; empty if free text, or if only the template knows them
    computed: bool  # follows from other answers and is never asked
    help: str = ""


def load_questions(copier_yml: str, read: Callable[[str], str] | None = None) -> dict[str, Question]:
    """Return the questions of a copier.yml in their order. `read` returns other files of the template.

    Raises ScaffoldError if it is no mapping in YAML.
    """
    entries: dict[str, Any] = {}
    for document in documents("copier.yml", copier_yml, read):
        if not isinstance(document, dict):
            raise ScaffoldError("the template's copier.yml holds no questions", "Write a mapping of questions there.")
        entries.update(document)
    if not entries:
        raise ScaffoldError("the template's copier.yml holds no questions", "Write a mapping of questions there.")
    questions = {}
    for name, entry in entries.items():
        if name.startswith("_"):
            continue
        details = entry if isinstance(entry, dict) else {"default": entry}
        questions[name] = Question(
            name=name,
            type=details.get("type", "str"),
            default=details.get("default"),
            choices=_choices(details.get("choices"), read),
            computed=details.get("when") is False,
            help=details.get("help", ""),
        )
    return questions


def documents(path: str, text: str, read: Callable[[str], str] | None) -> list[Any]:
    """Return the YAML documents of a template's file; `!include PATH` stands for those of another, as for copier."""
    import yaml

    class Loader(yaml.SafeLoader):
        """A class of its own, since constructors are added to the class."""

    def include(loader: yaml.SafeLoader, node: yaml.Node) -> list[Any]:
        name = str(loader.construct_scalar(node))  # type: ignore[arg-type]  # anything else is an error of YAML's own
        return documents(name, read(name), read) if read else [{}]

    Loader.add_constructor("!include", include)
    try:
        found = list(yaml.load_all(text, Loader))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ScaffoldError(f"the template's {path} is not YAML: {reason}", "Correct it there.") from error
    return [each for document in found for each in (document if isinstance(document, list) else [document])]


def _choices(choices: Any, read: Callable[[str], str] | None) -> dict[str, str]:
    """Return the choices as copier takes them, each with the text that it shows: a mapping, a list, or an include."""
    if isinstance(choices, str):
        included = re.fullmatch(r"\s*\{%-?\s*include\s+'([^']+)'\s*-?%\}\s*", choices)
        choices = documents(included[1], read(included[1]), read)[0] if included and read else None
    if isinstance(choices, dict):
        return {str(value): str(title) for title, value in choices.items() if not isinstance(value, (dict, list))}
    return {str(choice): str(choice) for choice in choices or () if not isinstance(choice, (dict, list))}


def from_options(preset: str | None, model: str | None, pairs: Iterable[str]) -> dict[str, Given]:
    """Return what --preset, --model and --set say. Raises UsageError for a malformed or repeated one, or a bad file."""
    given = {}
    if preset is not None and own_preset.is_file(preset):
        given.update(own_preset.read(preset, "--preset"))
    elif preset is not None:
        given["preset"] = Given(preset, "--preset")
    if model is not None:
        given["model"] = Given(model, "--model")
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {show(pair)} is not KEY=VALUE", "Write it as --set nodes=4.")
        if name in given:
            raise UsageError(f"{show(name)} is given twice", "Keep one of them.")
        given[name] = Given(text, f"--set {name}")
    return given


def check(given: Mapping[str, Given], questions: Mapping[str, Question]) -> dict[str, Any]:
    """Return the given answers in the types of their questions.

    Raises UsageError for a key that no question has or that is computed, and for a value of another type or outside
    the choices. What a value may be beyond that is up to the validators of copier.yml.
    """
    open_names = [question.name for question in questions.values() if not question.computed]
    return {name: _check_one(name, answer, questions.get(name), open_names) for name, answer in given.items()}


def _check_one(name: str, answer: Given, question: Question | None, open_names: list[str]) -> Any:
    keys = "`ddp-scaffold new --help` lists the questions."
    if question is None:
        hint = _closest(name, open_names) or keys
        raise UsageError(f"{answer.where}: there is no question {show(name)}", hint)
    if question.computed:
        raise UsageError(f"{answer.where}: {show(name)} follows from other answers", keys)
    if question.type == "yaml":
        return _parse(name, answer)
    if not answer.plain:
        raise UsageError(f"{answer.where}: {show(name)} must have one plain value", "Write it as `key: value`.")
    if question.choices and answer.text not in question.choices:
        listed = ", ".join(question.choices)
        short = len(listed) <= FEW
        ways = f"Choose one of {listed}." if short else f"`ddp-scaffold {LISTED.get(name, 'new --help')}` lists them."
        meant = preset_meant if name == "preset" else _closest
        hint = meant(answer.text, question.choices) or ways
        among = listed if short else f"the {len(question.choices)} choices"
        raise UsageError(f"{answer.where}: {show(answer.text)} is none of {among}", hint, name)
    if question.type == "int":
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", answer.text):
            example = question.default if isinstance(question.default, int) else 4  # 4: where a preset has the default
            raise UsageError(
                f"{answer.where}: {show(answer.text)} is not a whole number", f"Write it as {name}={example}."
            )
        return int(answer.text)
    return answer.text


def _parse(name: str, answer: Given) -> Any:
    """Return what an answer in YAML holds."""
    import yaml

    from ..presets.yaml_text import BoundedLoader

    try:
        return yaml.load(answer.text, BoundedLoader)
    except Exception as error:  # of values that look like dates, numbers or binary, PyYAML raises nearly anything
        reason = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        raise UsageError(f"{answer.where}: {show(name)} is not YAML: {reason}", "Correct it there.") from error


def _closest(text: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, known, n=1)
    return f"Did you mean {close[0]}?" if close else ""


def is_default(question: Question, answers: Mapping[str, Any], read: Callable[[str], str]) -> bool:
    """Tell whether an answer is what the template itself would answer, given all others (`answers`).

    `read` returns the files of the template that a default includes.
    """
    from jinja2 import FunctionLoader, StrictUndefined, TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    default = question.default
    if isinstance(default, str):
        try:
            jinja = SandboxedEnvironment(
                undefined=StrictUndefined, loader=FunctionLoader(read), trim_blocks=True, lstrip_blocks=True
            )
            default = jinja.from_string(default).render(answers)
        except TemplateError:  # a filter that only copier has: then the answer is spelled out, which is never wrong
            return False
    return default is not None and str(default) == str(answers[question.name])
