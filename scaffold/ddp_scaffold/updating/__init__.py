"""`ddp-scaffold update`: plan, trial, report, put, undo; a module each."""
