"""Decontamination: find items of evaluation sets in documents and remove them."""
