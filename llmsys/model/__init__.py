"""The Transformer as plain torch modules. Nothing here knows ranks or process groups."""
