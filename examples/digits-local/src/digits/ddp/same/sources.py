"""Whether all ranks run the same code: another version on one node trains another model there, in silence."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

from ..agree import gather
from ..errors import ConfigError
from ..start.groups import Job
from .rows import NOTHING, differences, digest

log = logging.getLogger("ddp")

MOST = 2000  # files
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
REMEDY = "let all nodes use one copy, or copy the project again; change no file while a job starts"


def compare_sources(job: Job) -> None:
    """Check that the package's files, and every module of your own that is imported by now, are the same on all ranks.

    What only some ranks have imported is left out, and what cannot be read is warned of.

    Raises:
        ConfigError: on all ranks, naming the first file, where each rank has it, and further ones.
    """
    if job.world_size == 1:
        return
    files, checksums = own_files(), {}
    for name, path in files.items():
        try:
            checksums[name] = digest([path.read_bytes().decode("latin-1")])
        except OSError as error:
            checksums[name] = NOTHING
            log.warning("a source file cannot be compared between ranks: %s", error)
    found = [each for each in differences(job, checksums, most=MOST) if NOTHING not in each.values]
    if not found:
        return
    first = found[0]
    paths = gather(job, str(files[first.name]))
    example = dict(zip(reversed(first.values), reversed(paths), strict=True))  # of the first rank that has it
    first = replace(first, values=tuple(f"{example[checksum]} ({checksum})" for checksum in first.values))
    others = ", ".join(each.name for each in found[1:4]) + (" and others" if len(found) > 4 else "")
    problem = f"not all ranks run the same code: {first.name} is {first.text(job.hosts)}"
    raise ConfigError(problem + (f"; other files that differ: {others}" if others else ""), REMEDY, "ranks_differ")


def own_files() -> dict[str, Path]:
    """Name -> path of the .py files that are not installed: all of this package, and modules imported by now."""
    package = Path(__file__).parents[2]
    found = {}
    if (package / "__init__.py").exists():  # else it is a whole repository
        found = {f"{package.name}/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    known = {str(path) for path in found.values()}
    library = sysconfig.get_path("stdlib") + os.sep
    for name, module in list(sys.modules.items()):  # thousands: hence no Path until one is of interest
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file in known or file.startswith(library):
            continue
        if any(part in file for part in INSTALLED) or not os.path.isabs(file) or not os.path.exists(file):
            continue  # torch.ops and others only say that they are files
        found[os.path.basename(file) if name == "__main__" else name] = Path(file)
    return dict(sorted(found.items())[:MOST])
