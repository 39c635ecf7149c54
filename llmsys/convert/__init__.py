"""Weights both ways between our checkpoints and Hugging Face folders."""
