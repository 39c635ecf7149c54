"""Files of lines in, pairs of token sequences out: translations, and texts with labels."""
