"""Behind `loader`: which samples are whose, the processes that read them, and what goes wrong there."""
