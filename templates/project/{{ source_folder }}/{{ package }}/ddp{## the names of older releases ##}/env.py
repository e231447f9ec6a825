# Moved to start/launcher.py in 0.4.0. This name stays for one release.
import sys

from .start import launcher as moved
from .start.launcher import *  # noqa: F403

sys.modules[__name__] = moved
