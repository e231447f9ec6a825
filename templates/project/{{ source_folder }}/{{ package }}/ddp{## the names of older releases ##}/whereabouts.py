# Moved to watch/whereabouts.py in 0.4.0. This name stays for one release.
import sys

from .watch import whereabouts as moved
from .watch.whereabouts import *  # noqa: F403

sys.modules[__name__] = moved
