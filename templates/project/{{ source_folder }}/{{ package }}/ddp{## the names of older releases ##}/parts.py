# Moved to loading/parts.py in 0.4.0. This name stays for one release.
import sys

from .loading import parts
from .loading.parts import *  # noqa: F403

sys.modules[__name__] = parts
