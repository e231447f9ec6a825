# Moved to trace/replicas.py in 0.4.0. This name stays for one release.
import sys

from .trace import replicas as moved
from .trace.replicas import *  # noqa: F403

sys.modules[__name__] = moved
