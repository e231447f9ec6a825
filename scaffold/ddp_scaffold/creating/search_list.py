"""A list to choose from on a terminal; what is typed is looked for in names, titles and words that are not shown.

questionary's list searches nothing but what it shows, and takes the entry marked before if nothing matches. This one
looks the same, and is made of the public parts of prompt_toolkit, which questionary is made of too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._errors import WIDTH

if TYPE_CHECKING:
    from prompt_toolkit.application import Application
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


@dataclass(frozen=True)
class Entry:
    """One line of the list, and the words that find it beside those that it shows."""

    name: str
    title: str
    words: Sequence[str] = ()


def matching(entries: Sequence[Entry], typed: str) -> list[tuple[Entry, list[str]]]:
    """Return the entries that have every typed word, each with those of its other words that were needed.

    They stay in their order, but for one whose name is typed in full: it comes first.
    """
    wanted = typed.casefold().split()
    found = []
    for entry in entries:
        shown = f"{entry.name} {entry.title}".casefold()
        missing = [part for part in wanted if part not in shown]
        needed = [word for word in entry.words if any(part in word.casefold() for part in missing)]
        if all(any(part in word.casefold() for word in needed) for part in missing):
            found.append((entry, needed))
    return sorted(found, key=lambda pair: pair[0].name.casefold() != typed.strip().casefold())


class SearchList:
    """What is typed so far, which of the matching entries is marked, and, at the end, the one that was chosen.

    Where nothing matches, those named in `always` are offered, below what `advice` makes of the text typed. None of
    them is marked before an arrow is pressed: Enter alone must not choose what nobody has looked for.
    """

    def __init__(
        self,
        message: str,
        mark: str,
        entries: Sequence[Entry],
        default: str,
        always: Sequence[str] = (),
        advice: Callable[[str], Sequence[str]] = lambda typed: (),
    ) -> None:
        self.message, self.mark, self.entries, self.advice = message, mark, entries, advice
        self.always = [entry for name in always for entry in entries if entry.name == name]
        self.width = max(len(entry.name) for entry in entries)
        self.typed = ""
        self.marked: int | None = next((number for number, entry in enumerate(entries) if entry.name == default), 0)
        self.chosen: Entry | None = None

    def ask(self) -> str:
        """Return the name of the chosen entry. Raises KeyboardInterrupt for Ctrl-C, EOFError if the input ends."""
        return self._application().run()

    def search(self, text: str) -> None:
        """Look for another text; the first entry that has it is marked."""
        self.typed = text
        self.marked = 0 if matching(self.entries, text) else None

    def move(self, step: int) -> None:
        """Mark an entry below or above, from the last one on the first."""
        count = len(self._shown())
        before = self.marked if self.marked is not None else -1 if step > 0 else 0
        self.marked = (before + step) % count if count else None

    def choose(self) -> str | None:
        """Return the name of the marked entry, or None: none is marked, and nothing is chosen."""
        self.chosen = None if self.marked is None else self._shown()[self.marked][0]
        return self.chosen.name if self.chosen else None

    def _shown(self) -> list[tuple[Entry, list[str]]]:
        """Return the entries that match, or else those that are always offered."""
        return matching(self.entries, self.typed) or [(entry, []) for entry in self.always]

    def head(self) -> StyleAndTextTuples:
        """Return the question with what is typed, or with the answer."""
        question: StyleAndTextTuples = [("class:qmark", self.mark), ("class:question", f" {self.message} ")]
        if self.chosen:
            return [*question, ("class:answer", f"{self.chosen.name}  {self.chosen.title}")]
        return [*question, ("class:instruction", "(type to search, arrows to move) "), ("bold", self.typed)]

    def lines(self) -> StyleAndTextTuples:
        """Return the entries that match, each with the words that it was found by."""
        tokens: StyleAndTextTuples = []
        if not matching(self.entries, self.typed):
            tokens.append(("class:search_none", "   nothing matches; Backspace takes back what was typed\n"))
            tokens += [("", f"   {line}\n") for line in self.advice(self.typed)]
        for number, (entry, needed) in enumerate(self._shown()):
            marked = number == self.marked
            tokens += [("class:pointer", " » "), ("[SetCursorPosition]", "")] if marked else [("", "   ")]
            tokens.append(("class:highlighted" if marked else "", f"{entry.name:<{self.width}}  {entry.title}"))
            tokens += [("class:instruction", f"  {', '.join(needed)}")] if needed else []
            tokens.append(("", "\n"))
        return tokens

    def _application(self) -> Application[str]:
        from prompt_toolkit.application import Application
        from prompt_toolkit.filters import is_done
        from prompt_toolkit.layout import ConditionalContainer, Dimension, FormattedTextControl, HSplit, Layout, Window
        from questionary.constants import DEFAULT_STYLE

        # Lines wrap, and go on indented: no title is cut off, and none is longer than what else is printed.
        head, body = (
            Window(
                FormattedTextControl(text),
                wrap_lines=True,
                get_line_prefix=lambda _, wrapped: "     " if wrapped else "",
                always_hide_cursor=True,
                dont_extend_height=True,
            )
            for text in (self.head, self.lines)
        )
        return Application(
            layout=Layout(HSplit([head, ConditionalContainer(body, filter=~is_done)], width=Dimension(max=WIDTH))),
            key_bindings=self._keys(),
            style=DEFAULT_STYLE,
        )

    def _keys(self) -> KeyBindings:
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("up")
        @keys.add("c-p")
        def _(event: KeyPressEvent) -> None:
            self.move(-1)

        @keys.add("down")
        @keys.add("c-n")
        def _(event: KeyPressEvent) -> None:
            self.move(1)

        @keys.add("backspace")
        def _(event: KeyPressEvent) -> None:
            self.search(self.typed[:-1])

        @keys.add("c-u")
        def _(event: KeyPressEvent) -> None:
            self.search("")

        @keys.add("<any>")
        @keys.add("<bracketed-paste>")
        def _(event: KeyPressEvent) -> None:
            text = event.data.strip("\r\n")
            if text.isprintable():  # else it is a key like F1, or a page was pasted
                self.search(self.typed + text)

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            if (name := self.choose()) is not None:
                event.app.exit(result=name)

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        @keys.add("c-d")
        def _(event: KeyPressEvent) -> None:
            event.app.exit(exception=EOFError, style="class:aborting")

        return keys
