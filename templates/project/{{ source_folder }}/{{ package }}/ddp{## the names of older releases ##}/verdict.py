# Moved to watch/verdict.py in 0.4.0. This name stays for one release.
import sys

from .watch import verdict as moved
from .watch.verdict import *  # noqa: F403

sys.modules[__name__] = moved
