"""Quality rules: texts in; keep or drop out, with the test, the value and the threshold."""
