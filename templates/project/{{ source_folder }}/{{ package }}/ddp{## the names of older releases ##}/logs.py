# Moved to start/logs.py in 0.4.0. This name stays for one release.
import sys

from .start import logs
from .start.logs import *  # noqa: F403

sys.modules[__name__] = logs
