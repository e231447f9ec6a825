# Moved to watch/monitor.py in 0.4.0. This name stays for one release.
import sys

from .watch import monitor as moved
from .watch.monitor import *  # noqa: F403

sys.modules[__name__] = moved
