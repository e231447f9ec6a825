# Moved to watch/exits.py in 0.4.0. This name stays for one release.
import sys

from .watch import exits as moved
from .watch.exits import *  # noqa: F403

sys.modules[__name__] = moved
