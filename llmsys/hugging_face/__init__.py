"""Conversion between Hugging Face's `config.json` and ModelConfig, without importing
transformers.
"""
