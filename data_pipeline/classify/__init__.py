"""A linear classifier over hashed words: its features, its file, and how one is made."""
