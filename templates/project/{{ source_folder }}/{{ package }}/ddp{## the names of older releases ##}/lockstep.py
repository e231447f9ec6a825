# Moved to loading/lockstep.py in 0.4.0. This name stays for one release.
import sys

from .loading import lockstep as moved
from .loading.lockstep import *  # noqa: F403

sys.modules[__name__] = moved
