"""What a run writes about itself. `python -m <package>.ddp.report runs/<id>` makes a report again."""

from .report import note_slow as note_slow
from .report import write as write
