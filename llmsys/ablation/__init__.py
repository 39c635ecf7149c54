"""Compare datasets by the models that are trained on them."""
