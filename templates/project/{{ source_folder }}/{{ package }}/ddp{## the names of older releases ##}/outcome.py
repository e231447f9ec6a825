# Moved to report/outcome.py in 0.4.0. This name stays for one release.
import sys

from .report import outcome as moved
from .report.outcome import *  # noqa: F403

sys.modules[__name__] = moved
