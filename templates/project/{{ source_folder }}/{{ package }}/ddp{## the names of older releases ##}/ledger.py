# Moved to trace/collectives.py in 0.4.0. This name stays for one release.
import sys

from .trace import collectives as moved
from .trace.collectives import *  # noqa: F403

sys.modules[__name__] = moved
