# Moved to start/board.py in 0.4.0. This name stays for one release.
import sys

from .start import board as moved
from .start.board import *  # noqa: F403

sys.modules[__name__] = moved
