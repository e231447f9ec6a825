"""From the launcher's variables to the process groups; settings, logs, the owner of a run, and reasons to stop."""
