# Moved to start/findings.py in 0.4.0. This name stays for one release.
import sys

from .start import findings as moved
from .start.findings import *  # noqa: F403

sys.modules[__name__] = moved
