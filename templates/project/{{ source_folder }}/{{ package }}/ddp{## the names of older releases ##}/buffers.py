# Moved to same/buffers.py in 0.4.0. This name stays for one release.
import sys

from .same import buffers as moved
from .same.buffers import *  # noqa: F403

sys.modules[__name__] = moved
