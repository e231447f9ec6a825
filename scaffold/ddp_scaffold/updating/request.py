"""What the user asks of `ddp-scaffold update`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    directory: Path
    to: str | None  # tag of a release; None: the newest
    preset: str | None  # of `cluster`
    pairs: tuple[str, ...]  # KEY=VALUE
    cluster: str | None  # the further cluster that `preset` and `pairs` are about; None: the project's own
    add: str | None  # preset of a further cluster that is new
    template: str | None  # None: the one that the project was made from
    dry_run: bool
    test: bool
    ask: bool
    quiet: bool  # nothing may be printed but the result
