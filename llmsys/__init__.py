"""llmsys: from raw web crawl to a trained Transformer."""

__version__ = "0.1.0"
