"""Lines of the generated training loop and of each ddp module, next to their limits; exit code 1 beyond one."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {"train.py": 250, "ddp": 200}


def main() -> int:
    """Print one line a file, longest first."""
    files = [(path, LIMITS["train.py"]) for path in ROOT.glob("templates/models/*/train.py")]
    files += [(path, LIMITS["ddp"]) for path in ROOT.glob("templates/project/*/*/ddp/*.py")]
    rows = sorted(((len(path.read_text().splitlines()), limit, path) for path, limit in files), reverse=True)
    for lines, limit, path in rows:
        print(f"{lines:5d} of {limit}  {path.relative_to(ROOT)}{'  TOO LONG' if lines > limit else ''}")
    return int(any(lines > limit for lines, limit, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
