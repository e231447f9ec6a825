# Moved to trace/drift.py in 0.4.0. This name stays for one release.
import sys

from .trace import drift as moved
from .trace.drift import *  # noqa: F403

sys.modules[__name__] = moved
