# Moved to start/stop.py in 0.4.0. This name stays for one release.
import sys

from .start import stop as moved
from .start.stop import *  # noqa: F403

sys.modules[__name__] = moved
