# Moved to start/rendezvous.py in 0.4.0. This name stays for one release.
import sys

from .start import rendezvous as moved
from .start.rendezvous import *  # noqa: F403

sys.modules[__name__] = moved
