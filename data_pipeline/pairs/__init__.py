"""Read translations and labelled texts from files of lines, and encode them as pairs of token
sequences.
"""
