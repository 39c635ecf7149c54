"""The decoder-only Transformer as plain torch modules; nothing here knows of ranks or process groups."""
