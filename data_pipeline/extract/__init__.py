"""Text extraction: HTML pages in, plain text out."""
