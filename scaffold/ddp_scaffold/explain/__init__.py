"""What a crashed or hung job has left, read: which rank failed first, what fault it was, and on what evidence."""
