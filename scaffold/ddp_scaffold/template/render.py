"""Answering the questions and rendering a template, with refusals told in terms of what the user gave."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import ScaffoldError, UsageError, show
from .copier_calls import Answered, CopierRefused, copy
from .given import Given
from .questions import Question
from .source import Template


@dataclass(frozen=True)
class Rendered:
    """What copier made of the answers."""

    answers: dict[str, Any]  # of the questions that were asked, in their order; what the project records
    facts: Mapping[str, Any]  # these, and all that follows from them (computed answers)
    update: RenderedUpdate | None = None  # what an update brings, if that was asked for


@dataclass(frozen=True)
class RenderedUpdate:
    """What an update renders, in a folder with nothing else."""

    folder: Path
    answered: Answered


class SuggestionRefused(UsageError):
    """The template refuses what was suggested, not given; a person can be asked."""


def answer(
    template: Template,
    destination: Path,
    questions: Mapping[str, Question],
    data: Mapping[str, Any],
    suggestions: Mapping[str, str],
    given: Mapping[str, Given],
    *,
    ask: bool = False,
    render: bool = True,
    answers_file: str | None = None,
) -> Rendered:
    """Answer the questions by `data`, then by asking (or by `suggestions` and defaults), and render the project.

    With `render=False` the questions are all that happens. Raises UsageError for an answer that a validator refuses,
    ScaffoldError if the template cannot be rendered.
    """
    try:
        facts, hidden, _ = copy(
            template, destination, data, suggestions, ask=ask, render=render, answers_file=answers_file
        )
    except CopierRefused as error:
        raise _explain(str(error), given, suggestions) from error
    return Rendered(_asked(questions, facts, hidden), facts)


def answer_for_update(
    template: Template,
    folder: Path,
    questions: Mapping[str, Question],
    data: Mapping[str, Any],
    given: Mapping[str, Given],
    answers_file: str,
) -> Rendered:
    """Answer the questions as `answer` does, and render what an update brings into a new folder, if that is possible.

    Both at once need one clone of the template less. Raises what `answer` raises.
    """
    try:
        answered = copy(template, folder, data, {}, for_update=True, answers_file=answers_file)
    except CopierRefused:  # if it is about the questions, it comes again; of the rest, the update itself shall tell
        return answer(template, folder, questions, data, {}, given, render=False, answers_file=answers_file)
    asked = _asked(questions, answered.facts, answered.hidden)
    return Rendered(asked, answered.facts, RenderedUpdate(folder, answered))


def _asked(questions: Iterable[str], facts: Mapping[str, Any], hidden: Set[str]) -> dict[str, Any]:
    return {name: facts[name] for name in questions if name not in hidden}


def refuse_skipped(given: Mapping[str, Given], rendered: Rendered) -> None:
    """Raise UsageError for an answer to a question that the other answers leave out. Copier would use it just once."""
    for name in given:
        if name not in rendered.answers:
            others = f"preset {rendered.answers['preset']}" if "preset" in rendered.answers else "the other answers"
            raise UsageError(
                f"{given[name].where}: {show(name)} is not asked with {others}",
                "Leave it out, or change the preset; see `ddp-scaffold new --help`.",
            )


def example_name(refused: str) -> str:
    """Return a project name like `refused` that is valid: no module is called anything_project."""
    slug = re.sub(r"[^a-z0-9]+", "-", refused.lower()).strip("-0123456789")[:50].strip("-")
    return f"{slug or 'my'}-project"


def _explain(text: str, given: Mapping[str, Given], suggestions: Mapping[str, str]) -> ScaffoldError:
    """Return what to tell of a refusal: which answer it is about, and how to give another."""
    found = re.match(r"(?:Validation error for question|Invalid choice for) '(\w+)': (.*)", text)
    if found:
        name, told = found.groups()
        reason, _, advice = told.removesuffix("; choose another").partition("; use ")
        if name in given:
            hint = f"Use {advice}." if advice else f"Give {name} another value."
            return UsageError(f"{given[name].where}: {show(given[name].text)} {reason}", hint)
        if name in suggestions:
            return SuggestionRefused(
                f"DEST: project name {show(suggestions[name])} {reason}",
                f"Pass --set {name}=NAME, as in --set {name}={example_name(suggestions[name])}.",
            )
        return UsageError(f"{name}: {reason}", f"Pass --set {name}=VALUE.", name)
    required = re.match(r'Question "(\w+)" is required', text)
    if required:
        name = required[1]
        return UsageError(f"{name} has no default", f"Pass --set {name}=VALUE, or run in a terminal without -y.")
    return ScaffoldError(f"the template cannot be rendered: {text}", "`ddp-scaffold --debug ...` shows where.")
