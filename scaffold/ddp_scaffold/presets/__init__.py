"""What is known about the places where a project can train: how preset files are read, checked, shown and made."""
