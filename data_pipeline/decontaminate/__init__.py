"""Items of evaluation sets, found in documents and taken out of them."""
