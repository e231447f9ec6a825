"""Are the ranks the same before step 1: their code, networks and buffers, and do all parameters get a gradient."""

from .rows import NOTHING as NOTHING
from .rows import Difference as Difference
from .rows import differences as differences
from .rows import digest as digest
