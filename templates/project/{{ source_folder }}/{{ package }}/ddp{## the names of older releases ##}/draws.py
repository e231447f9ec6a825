# Moved to loading/draws.py in 0.4.0. This name stays for one release.
import sys

from .loading import draws as moved
from .loading.draws import *  # noqa: F403

sys.modules[__name__] = moved
