# Moved to watch/slow_ranks.py in 0.4.0. This name stays for one release.
import sys

from .watch import slow_ranks as moved
from .watch.slow_ranks import *  # noqa: F403

sys.modules[__name__] = moved
