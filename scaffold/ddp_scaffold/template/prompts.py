"""What copier asks on a terminal, whole: prompt_toolkit cuts a question and a refusal off at the terminal's edge."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._errors import fill

if TYPE_CHECKING:
    from prompt_toolkit.formatted_text import StyleAndTextTuples

MARGIN = 3  # columns of copier's mark, and of the answer below it
NAMED = re.compile(r"Validation error for question '\w+': ")  # the question stands right above


@contextmanager
def whole_prompts() -> Iterator[None]:
    """Questions and refusals go on in the next line where they would leave the terminal, or 78 columns.

    Copier and prompt_toolkit have no option for it, so two of their names (copier 9.17 to 9.19, prompt_toolkit 3) are
    replaced meanwhile. Where a release has them no more, lines are cut off as before, and all else works.
    """
    names = (("copier._main", "unsafe_prompt"), ("prompt_toolkit.shortcuts.prompt", "ValidationToolbar"))
    modules = [(import_module(module), name) for module, name in names]
    before = [(module, name, getattr(module, name)) for module, name in modules if hasattr(module, name)]
    try:
        for module, name, own in before:
            setattr(module, name, _refusal if name == "ValidationToolbar" else _filling(own))
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


def _filling(ask: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return `ask`, with the text of each question in as many lines as it needs."""

    def run(questions: Sequence[dict[str, Any]], *rest: Any, **options: Any) -> dict[str, Any]:
        for question in questions:
            text, newline, answer = question["message"].rpartition("\n")  # the answer is typed on a line of its own
            if newline:
                question["message"] = fill(text, indent=MARGIN, first=MARGIN) + newline + answer
        return ask(questions, *rest, **options)

    return run


def _refusal() -> Any:
    """Return the line below a prompt that says why an answer is refused, or as many lines as it needs."""
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import has_validation_error
    from prompt_toolkit.layout import ConditionalContainer, FormattedTextControl, Window

    def text() -> StyleAndTextTuples:
        error = get_app().current_buffer.validation_error
        return [("class:validation-toolbar", fill(NAMED.sub("", error.message, count=1)))] if error else []

    lines = Window(FormattedTextControl(text), dont_extend_height=True)
    return ConditionalContainer(lines, filter=has_validation_error)
