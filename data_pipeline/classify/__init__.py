"""A linear classifier over hashed words: features, file format and training."""
