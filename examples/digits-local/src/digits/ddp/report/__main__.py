"""`python -m <package>.ddp.report runs/<id>` makes report.md again."""

from .report import main

main()
