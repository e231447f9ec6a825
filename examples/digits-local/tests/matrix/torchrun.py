"""torchrun, and afterwards the exit code of every rank in a file: torchrun itself names only those that failed first.

Usage: python torchrun.py FILE [arguments of torchrun]
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ranks: dict[str, "subprocess.Popen[Any]"] = {}


class Popen(subprocess.Popen):  # type: ignore[type-arg]  # generic only in the stubs
    """Remembers each child that is a rank."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        environment = options.get("env") or {}
        if "RANK" in environment:
            ranks[environment["RANK"]] = self


subprocess.Popen = Popen  # type: ignore[misc]

from torch.distributed.run import main  # noqa: E402  # after Popen, which it imports by name

try:
    main(sys.argv[2:])
finally:
    codes = {rank: child.poll() for rank, child in sorted(ranks.items())}
    Path(sys.argv[1]).write_text(json.dumps(codes))
