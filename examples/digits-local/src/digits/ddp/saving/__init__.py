"""Behind `checkpoint.py`: how a state gets to disk beside training, and back."""
