"""llmsys: from raw web crawl to a trained Transformer."""

__version__ = "0.2.0"
