"""Tokenization: documents in, a tokenizer and token shards out."""
