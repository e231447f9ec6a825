"""The answers with which a project goes on: the recorded ones, those changed by --set, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .._errors import UsageError
from ..template import own_preset
from ..template.given import Given
from ..template.questions import check, is_default, load_questions
from ..template.render import Rendered, answer, answer_for_update, refuse_skipped
from ..template.source import Template
from .recorded import Recorded, Refused

# What these decided is the user's since: another answer would reach nothing, or tear the project apart.
SETTLED = {
    "project_name": "Rename it in pyproject.toml and README.md.",
    "package": "Rename it yourself with git mv, correct the imports, and commit: the next update records the new name.",
    "model": "model.py, data.py and configs/ are yours. Make a new project with --model, and move your code.",
    "source_folder": "Move the package yourself with git mv, and commit: the next update records where it is.",
    "code": "Make a new project, and move your code.",
    "collective_timeout_s": "Change clocks.collective_s in configs/train.yaml, or set DDP_CLOCKS__COLLECTIVE_S.",
    "tracker": "Change log.tracker in configs/train.yaml, and the dependency in pyproject.toml.",
}
# What a project shares with all of its clusters.
SHARED = ("project_name", "package", "code", "source_folder", "command", "model", "tracker", "collective_timeout_s")


def refuse_settled(given: Mapping[str, Given]) -> None:
    """Raise Refused for an answer that cannot be changed any more."""
    for name in given:
        if name in SETTLED:
            raise Refused(f"{given[name].where}: {name} was settled when the project was made", SETTLED[name])


def answers_for_update(
    recorded: Recorded, given: Mapping[str, Given], template: Template, scratch: Path
) -> tuple[Rendered, list[str]]:
    """Return the answers for the release `template.ref`, and the names of those that the user has never been asked.

    With another preset, an answer that was the old preset's default becomes the new one's. Raises Refused.
    """
    questions = load_questions(template.read("copier.yml"), template.read)
    kept = {
        name: value for name, value in recorded.answers.items() if name in questions and not questions[name].computed
    }
    if "preset" in given:
        kept = _without_defaults(recorded, kept, template, scratch)
        kept = own_preset.replace(kept, {"preset": given["preset"]})
    try:
        # An answer that was recorded may be one that this release does not ask for: only those given now must count.
        named = {**recorded.renamed, **given}
        data = check(kept | named, questions)
        if "preset" in given or own_preset.ANSWER in given:
            now = kept | named
            own_preset.check_recorded(now["preset"].text, data.get(own_preset.ANSWER), now)
        folder = scratch / "updated" / recorded.name
        rendered = answer_for_update(template, folder, questions, data, named, recorded.name)
        refuse_skipped(given, rendered)
    except UsageError as error:
        if any(error.message.startswith(f"{now.where}: ") for now in recorded.renamed.values()):
            raise Refused(error.message, "Rename the package once more (git mv), to such a name.") from error
        settled = f"It was settled when the project was made: stay at {recorded.commit}, or make a new project."
        raise Refused(error.message, settled if error.question in SETTLED else error.hint) from error
    return rendered, [name for name in rendered.answers if name not in recorded.answers and name not in given]


def answers_for_cluster(
    main: Recorded, given: Mapping[str, Given], template: Template, scratch: Path, name: str
) -> Rendered:
    """Return the answers of a further cluster: what the project shares with it, the preset, and what is given."""
    questions = load_questions(template.read("copier.yml"), template.read)
    answers = {**main.answers, **main.renamed}
    shared = {key: answers[key] for key in SHARED if key in answers and key in questions}
    try:
        data = check(shared | dict(given), questions)
        if "preset" in given:
            own_preset.check_recorded(given["preset"].text, data.get(own_preset.ANSWER), given)
        rendered = answer(template, scratch / "answers", questions, data, {}, given, render=False, answers_file=name)
        refuse_skipped(given, rendered)
    except UsageError as error:
        raise Refused(error.message, error.hint) from error
    return rendered


def _without_defaults(
    recorded: Recorded, kept: dict[str, Given], template: Template, scratch: Path
) -> dict[str, Given]:
    """Drop the answers that are what the old release answers by itself: they were never the user's."""
    old = replace(template, ref=recorded.commit)
    questions = load_questions(old.read("copier.yml"), old.read)
    given = {name: value for name, value in recorded.answers.items() if name in questions}
    rendered = answer(
        old, scratch / "old", questions, check(given, questions), {}, {}, render=False, answers_file=recorded.name
    )
    mine = {
        name
        for name in rendered.answers
        if name in SHARED or name == "preset" or not is_default(questions[name], rendered.facts, old.read)
    }
    return {name: value for name, value in kept.items() if name in mine}
