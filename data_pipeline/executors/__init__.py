"""Tasks in, their results out: who does the work, and what happens when a worker dies."""
