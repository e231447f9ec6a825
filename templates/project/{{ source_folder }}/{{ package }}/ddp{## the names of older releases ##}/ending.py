# Moved to watch/leave.py in 0.4.0. This name stays for one release.
import sys

from .watch import leave as moved
from .watch.leave import *  # noqa: F403

sys.modules[__name__] = moved
