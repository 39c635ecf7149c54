"""Hugging Face's `config.json` as a model config, and back. Knows the published formats; imports nothing of theirs."""
