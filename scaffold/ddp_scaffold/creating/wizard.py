"""On a terminal, before copier asks: what is given is tried out, the place is chosen, and its facts are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import _output
from .._errors import ScaffoldError
from ..presets.facts import tell
from ..template import own_preset
from ..template.given import Given
from ..template.prompts import whole_prompts
from ..template.questions import Question, check
from ..template.render import Rendered, SuggestionRefused, example_name, refuse_skipped

# A preset's value decides these. Of partition and QoS it holds only a default: the right one depends on the job.
DECIDED = ("launcher", "gpus_per_node", "cpus_per_task", "modules")
GENERIC = (
    "generic-slurm",
    "generic-pbs",
    "generic-kubernetes",
    "generic-skypilot",
)  # for a cluster that no preset names
MARK = "🎤"  # as copier's questions have

Try = Callable[..., Rendered]  # render.answer without rendering: takes data, suggestions and given


@dataclass(frozen=True)
class Start:
    """What is known before the questions: the answers given and their values, the project's name, the preset's path."""

    given: dict[str, Given]
    data: dict[str, Any]
    suggestions: dict[str, str]
    own: str | None = None  # the path of the user's own preset file, as it was typed


def prepare(start: Start, questions: Mapping[str, Question], first_try: Try, directory: str) -> Start:
    """Return `start` with the place where the project will train, which is asked for, and what its preset decides.

    A wrong answer on the command line is reported before the first question, not after the last one. `directory` is
    the name of the destination. Raises UsageError for such an answer, ScaffoldError if the input ends.
    """
    try:
        early = _try(first_try, start)
    except SuggestionRefused as error:
        _output.note(error.message)
        start = replace(start, suggestions={"project_name": example_name(directory)})
        early = _try(first_try, start)
    question = questions.get("preset")
    if question is None or not (question.choices or "preset" in start.given):
        return start  # a fork that knows no presets, or only copier knows which
    if "preset" not in start.given:
        chosen, own = choose(question, early.answers["preset"])
        given = start.given | chosen
        start = replace(start, given=given, data=check(given, questions), own=own)
        early = _try(first_try, start)
    refuse_skipped(start.given, early)
    decided = _decided(early, start.given)
    told = tell(early.facts.get("preset_data"), start.given["preset"].text == own_preset.OWN)
    if told is not None:
        title, lines = told
        if changed := _last_change(start.given["preset"].text):
            place = next((number for number, (label, _) in enumerate(lines) if label == "status"), len(lines) - 1) + 1
            lines.insert(place, ("changed", changed))
        if decided:
            settled = ", ".join(f"{name}={value}" for name, value in decided.items())
            lines.append(("not asked", f"{settled} (--set changes them)"))
        _output.rows(title, lines)
        _output.say()
    return replace(start, data=start.data | decided)


def choose(question: Question, default: str) -> tuple[dict[str, Given], str | None]:
    """Ask for a preset in a list that can be searched, in the template's order, and for the path if it is a file.

    Returns the answers, and that path. Raises ScaffoldError if the input ends.
    """
    import questionary

    from ..presets.load import keywords
    from .search_list import Entry, SearchList

    words = keywords()
    entries = [Entry(name, title, words.get(name, ())) for name, title in question.choices.items()]
    text = question.help or "Where will it train?"
    name = _ask(SearchList(text, MARK, entries, default, (*GENERIC, own_preset.OWN), _without_preset).ask)
    if name != own_preset.OWN:
        return {"preset": Given(name, "preset")}, None
    with whole_prompts():  # a file's problems may be long
        prompt = questionary.path(
            "Which preset file? (ddp-scaffold presets init NAME makes one)\n ",
            qmark=MARK,
            validate=lambda text: own_preset.problem_in(Path(text or "no file given").expanduser()) or True,
            file_filter=lambda path: Path(path).is_dir() or path.endswith((".yml", ".yaml")),
            complete_while_typing=False,
        )
        path = _ask(prompt.unsafe_ask)
    return own_preset.read(path, "preset"), path


def _last_change(preset: str) -> str:
    """Return when a preset changed last and in what, or nothing: a file of one's own, no git, no releases."""
    from ..presets.history import last_changes
    from ..template.source import carried_releases

    with suppress(ScaffoldError):
        if preset != own_preset.OWN and (change := last_changes([preset], carried_releases).get(preset)):
            return f"{change.words()} (ddp-scaffold presets diff {preset})"
    return ""


def _without_preset(typed: str) -> list[str]:
    """Return what to say where no preset has what was typed. A preset's name is made of it, if it can be one."""
    name = re.sub("[^a-z0-9]+", "-", typed.casefold()).strip("-")[:40].strip("-") or "mycluster"
    return [
        "To describe your cluster: Ctrl-C, then",
        f"  ddp-scaffold presets init {name}",
        "Or take one of these (arrows, Enter) and answer a few questions more:",
    ]


def _try(first_try: Try, start: Start) -> Rendered:
    return first_try(data=start.data, suggestions=start.suggestions, given=start.given)


def _ask(prompt: Callable[[], Any]) -> Any:
    try:
        return prompt()
    except EOFError as error:
        raise ScaffoldError("the input ended before the last question", "Answer by --set, or take -y.") from error


def _decided(early: Rendered, given: Mapping[str, Given]) -> dict[str, Any]:
    """Return the answers that need no question: the preset has a value, and nothing else is given."""
    preset = early.facts.get("preset_data")
    if not isinstance(preset, dict):
        return {}
    known = [name for name in DECIDED if name not in given and name in early.answers]
    return {name: early.answers[name] for name in known if (preset.get(name) or {}).get("value") is not None}
