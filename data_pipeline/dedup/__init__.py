"""Documents in, which of them are duplicates of which out."""
