# Moved to watch/siblings.py in 0.4.0. This name stays for one release.
import sys

from .watch import siblings as moved
from .watch.siblings import *  # noqa: F403

sys.modules[__name__] = moved
