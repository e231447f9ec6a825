# Moved to preflight/gpu_copies.py in 0.4.0. This name stays for one release.
import sys

from .preflight import gpu_copies as moved
from .preflight.gpu_copies import *  # noqa: F403

sys.modules[__name__] = moved
