# Moved to loading/held.py in 0.4.0. This name stays for one release.
import sys

from .loading import held as moved
from .loading.held import *  # noqa: F403

sys.modules[__name__] = moved
