"""Text in, language code and probability out."""
