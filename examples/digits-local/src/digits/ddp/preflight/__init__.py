"""Before the job: what is wrong with which machine or link. `python -m <package>.ddp.preflight` starts it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .__main__ import SECTIONS as SECTIONS
    from .__main__ import Ending as Ending
    from .__main__ import PreflightSettings as PreflightSettings
    from .__main__ import main as main
    from .__main__ import ours as ours
else:

    def __getattr__(name):
        """A name of the command, loaded at its first use: `python -m` would run a module twice that is loaded here."""
        if name in ("SECTIONS", "Ending", "PreflightSettings", "main", "ours"):
            return getattr(import_module(f"{__name__}.__main__"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
