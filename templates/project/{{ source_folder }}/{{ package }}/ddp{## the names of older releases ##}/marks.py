# Moved to trace/marks.py in 0.4.0. This name stays for one release.
import sys

from .trace import marks as moved
from .trace.marks import *  # noqa: F403

sys.modules[__name__] = moved
