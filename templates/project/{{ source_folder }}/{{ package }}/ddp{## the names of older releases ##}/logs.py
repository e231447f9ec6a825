# Moved to start/logs.py in 0.4.0. This name stays for one release.
import sys

from .start import logs as moved
from .start.logs import *  # noqa: F403

sys.modules[__name__] = moved
