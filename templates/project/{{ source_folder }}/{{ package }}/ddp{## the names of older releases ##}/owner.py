# Moved to start/owner.py in 0.4.0. This name stays for one release; launch scripts of jobs in a queue start it.
import sys

from .start import owner as moved
from .start.owner import *  # noqa: F403

if __name__ == "__main__":
    moved.main()
sys.modules[__name__] = moved
