"""Text in, keep or drop with the test, the value and the threshold out."""
