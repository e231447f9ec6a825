# Moved to trace/lines.py in 0.4.0. This name stays for one release.
import sys

from .trace import lines as moved
from .trace.lines import *  # noqa: F403

sys.modules[__name__] = moved
