"""What an update would do, or has done, as `ddp-scaffold update` prints it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .changelog import Entry
from .recorded import Refused
from .trial import Outcome

Tested = Literal["passed", "skipped"]


@dataclass(frozen=True)
class News:
    """What can be told before anything is tried."""

    project: Path
    since: str  # tag or commit of the template
    until: str  # tag
    gained: tuple[Entry, ...] = ()
    new_answers: Mapping[str, Any] = field(default_factory=dict)  # to questions that its release did not ask, by name
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The news, with what the trial showed and what has become of it."""

    news: News
    outcome: Outcome | None = None  # None: there was nothing to try
    diff: str | None = None  # with --dry-run
    applied: bool = False
    tested: Tested | None = None  # None: not asked for

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks, in the order in which they were found."""
        return self.news.notes + (tuple(self.outcome.notes) if self.outcome else ())

    @property
    def changes(self) -> dict[str, str]:
        """Return `added`, `changed`, `removed` or `conflict` for each path in the project that is touched, sorted."""
        return dict(sorted(self.outcome.changes.items())) if self.outcome else {}

    @property
    def conflicts(self) -> list[str]:
        """Return the paths with a conflict."""
        return [path for path, change in self.changes.items() if change == "conflict"]

    @property
    def carried(self) -> dict[str, str]:
        """Return where files are now that have moved, by their old paths."""
        return dict(sorted(self.outcome.carried.items())) if self.outcome else {}

    @property
    def left_out(self) -> dict[str, str]:
        """Return the reason for each path that the release changes, and the project has not."""
        return dict(sorted(self.outcome.left_out.items())) if self.outcome else {}

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints; its keys stand in `ddp_scaffold.commands.update`."""
        return {
            "version": 1,
            "project": str(self.news.project),
            "from": self.news.since,
            "to": self.news.until,
            "gained": [asdict(entry) for entry in self.news.gained],
            "new_answers": dict(self.news.new_answers),
            "files": [{"path": path, "change": change} for path, change in self.changes.items()],
            "conflicts": self.conflicts,
            "lost": self.outcome.lost if self.outcome else [],
            "moved_to": self.outcome.moved_to if self.outcome else {},
            "carried": self.carried,
            "left_out": [{"path": path, "why": why} for path, why in self.left_out.items()],
            "notes": list(self.notes),
            "applied": self.applied,
            "test": self.tested,
            "diff": self.diff,
        }


def require_nothing_lost(result: Result) -> None:
    """Raise Refused if edits would be lost; a file that is moved first takes its edits along, as a conflict."""
    outcome, news = result.outcome, result.news
    if outcome is None or not outcome.lost:
        return
    who = news.until if news.until != news.since else "a project with these answers"
    gone = [path for path in outcome.lost if path not in outcome.moved_to]
    ways = [shlex.join(["git", "mv", path, now]) for path, now in outcome.moved_to.items()]
    ways += [f"{shlex.join(['git', 'rm', *gone])} (move what you need of it first)"] if gone else []
    raise Refused(
        f"{who} no longer has {', '.join(outcome.lost)}, and your edits there would be lost",
        f"{'; '.join(ways)}. Then commit, and run the update again.",
        result.to_json(),
    )
