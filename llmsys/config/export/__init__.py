"""The model type of Hugging Face as which a model is exported: decided once, before the run and
when it is converted.
"""
