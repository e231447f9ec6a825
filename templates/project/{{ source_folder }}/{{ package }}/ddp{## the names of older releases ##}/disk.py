# Moved to preflight/disk.py in 0.4.0. This name stays for one release.
import sys

from .preflight import disk as moved
from .preflight.disk import *  # noqa: F403

sys.modules[__name__] = moved
