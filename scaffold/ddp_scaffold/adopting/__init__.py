"""`ddp-scaffold new --into-existing`: what a repository suggests, what comes beside it, what to change in its code."""
