# Moved to watch/blame.py in 0.4.0. This name stays for one release.
import sys

from .watch import blame as moved
from .watch.blame import *  # noqa: F403

sys.modules[__name__] = moved
