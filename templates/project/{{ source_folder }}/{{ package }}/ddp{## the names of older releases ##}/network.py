# Moved to start/network.py in 0.4.0. This name stays for one release.
import sys

from .start import network as moved
from .start.network import *  # noqa: F403

sys.modules[__name__] = moved
