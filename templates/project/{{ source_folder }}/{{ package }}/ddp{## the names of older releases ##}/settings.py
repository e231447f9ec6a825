# Moved to start/settings.py in 0.4.0. This name stays for one release.
import sys

from .start import settings as moved
from .start.settings import *  # noqa: F403

sys.modules[__name__] = moved
