# Moved to start/groups.py in 0.4.0. This name stays for one release.
import sys

from .start import groups as moved
from .start.groups import *  # noqa: F403

sys.modules[__name__] = moved
