# Moved to start/arrival.py in 0.4.0. This name stays for one release.
import sys

from .start import arrival as moved
from .start.arrival import *  # noqa: F403

sys.modules[__name__] = moved
