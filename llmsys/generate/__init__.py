"""Text from a trained model: sampling with a key-value cache."""
