# Moved to start/settings.py in 0.4.0. This name stays for one release.
import sys

from .start import settings
from .start.settings import *  # noqa: F403

sys.modules[__name__] = settings
