# Moved to trace/replicas.py in 0.4.0. This name stays for one release.
import sys

from .trace import replicas
from .trace.replicas import *  # noqa: F403

sys.modules[__name__] = replicas
