"""`python -m ddp_scaffold` is `ddp-scaffold`."""

from .cli import main

main()
