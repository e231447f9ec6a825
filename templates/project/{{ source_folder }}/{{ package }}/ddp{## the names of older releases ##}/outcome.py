# Moved to report/outcome.py in 0.4.0. This name stays for one release.
import sys

from .report import outcome
from .report.outcome import *  # noqa: F403

sys.modules[__name__] = outcome
