"""Language identification: texts in, language codes and probabilities out."""
