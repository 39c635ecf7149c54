"""Readers: crawl files in, record batches of pages out."""
