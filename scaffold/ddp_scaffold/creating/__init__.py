"""`ddp-scaffold new`: asks, shows what follows from the answers, and writes the project."""
