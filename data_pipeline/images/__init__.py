"""Read labelled images and store them as pairs of token sequences."""
