"""Which checkpoint is the best: each one that was evaluated has its metric in its manifest, and the directory tells.

So nothing beside the checkpoints has to be kept right, and a kill between two files cannot name the wrong one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
METRIC = "metric"  # in the manifest, and in the state


def checkpoints(root: Path) -> list[Path]:
    """Directories with a name that saving/directory.py gives, oldest first; what others have added is left alone."""
    found = (path for path in root.glob("step_*") if re.fullmatch(r"step_\d{8,}(\.\d{3,})?", path.name))
    return sorted(found, key=lambda path: (int(path.stem.removeprefix("step_")), int(path.suffix[1:] or 0)))


@dataclass(frozen=True)
class Rating:
    """What the evaluation of a checkpoint's weights has found: `value`, finite, of the metric `name`."""

    name: str
    value: float
    higher_is_better: bool

    def beats(self, other: Rating | None) -> bool:
        """Whether it is better; anything is better than none. Of another metric than `other` it counts as better."""
        if other is None or (self.name, self.higher_is_better) != (other.name, other.higher_is_better):
            return True
        return self.value > other.value if self.higher_is_better else self.value < other.value

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


def rating_of(checkpoint: Path) -> Rating | None:
    """What the manifest of a checkpoint says; None if it was not evaluated, or there is nothing to be read."""
    try:
        found = json.loads((checkpoint / MANIFEST).read_text())[METRIC]
        rating = Rating(str(found["name"]), float(found["value"]), found["higher_is_better"] is True)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return rating if math.isfinite(rating.value) else None


def best_of(checkpoints: Sequence[Path]) -> tuple[Path, Rating] | None:
    """The best one by the metric that the newest evaluated one has, and the first of equals; None if none has any.

    Args:
        checkpoints: the oldest first.
    """
    rated = [(path, rating) for path in checkpoints if (rating := rating_of(path))]
    if not rated:
        return None
    newest = rated[-1][1]
    best: tuple[Path, Rating] | None = None
    for path, rating in rated:
        comparable = (rating.name, rating.higher_is_better) == (newest.name, newest.higher_is_better)
        if comparable and (best is None or rating.beats(best[1])):
            best = path, rating
    return best
