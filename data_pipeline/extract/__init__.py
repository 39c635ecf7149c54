"""HTML pages in, plain text out."""
