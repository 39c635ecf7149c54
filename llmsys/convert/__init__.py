"""Convert weights between our checkpoints and Hugging Face folders, both ways."""
