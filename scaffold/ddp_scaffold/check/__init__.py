"""Hangs, wrong results and placebos, found in the code and the scripts of a training repository before they run."""
