"""Crawl files in, record batches of pages out."""
