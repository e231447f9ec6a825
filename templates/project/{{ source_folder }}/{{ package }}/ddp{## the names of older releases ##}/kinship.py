# Moved to start/kinship.py in 0.4.0. This name stays for one release.
import sys

from .start import kinship as moved
from .start.kinship import *  # noqa: F403

sys.modules[__name__] = moved
