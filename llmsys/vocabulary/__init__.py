"""Tokenizers, their special tokens, and chat templates."""
