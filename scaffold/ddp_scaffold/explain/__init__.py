"""What a crashed or hung job has left, read: which rank failed first, and what kind of fault it was."""
