# Moved to loading/parts.py in 0.4.0. This name stays for one release.
import sys

from .loading import parts as moved
from .loading.parts import *  # noqa: F403

sys.modules[__name__] = moved
