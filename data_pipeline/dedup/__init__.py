"""Deduplication: documents in, duplicates out."""
