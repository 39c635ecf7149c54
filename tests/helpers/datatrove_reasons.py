"""datatrove's names of reasons, by rule and test of this pipeline."""

# datatrove's reason by our rule and test; the two that have two directions say which by value and
# threshold.
REASONS = {
    "gopher_repetition:empty text": "empty",
    "gopher_repetition:share of duplicate paragraphs": "dup_para_frac",
    "gopher_repetition:share of characters in duplicate paragraphs": "dup_para_char_frac",
    "gopher_repetition:share of duplicate lines": "dup_line_frac",
    "gopher_repetition:share of characters in duplicate lines": "dup_line_char_frac",
    **{
        f"gopher_repetition:share of characters in the most frequent {n}-gram": f"top_{n}_gram"
        for n in (2, 3, 4)
    },
    **{
        f"gopher_repetition:share of characters in duplicate {n}-grams": f"duplicated_{n}_n_grams"
        for n in range(5, 11)
    },
    "gopher_quality:words <": "gopher_short_doc",
    "gopher_quality:words >": "gopher_long_doc",
    "gopher_quality:mean word length <": "gopher_below_avg_threshold",
    "gopher_quality:mean word length >": "gopher_above_avg_threshold",
    "gopher_quality:hash signs per word": "gopher_too_many_hashes",
    "gopher_quality:ellipses per word": "gopher_too_many_ellipsis",
    "gopher_quality:share of lines that start with a bullet": "gopher_too_many_bullets",
    "gopher_quality:share of lines that end with an ellipsis": "gopher_too_many_end_ellipsis",
    "gopher_quality:share of words with a letter": "gopher_below_alpha_threshold",
    "gopher_quality:stop words": "gopher_enough_stop_words",
    "c4_datatrove:sentences": "too_few_sentences",
    "c4_datatrove:lorem ipsum": "lorem_ipsum",
    "c4_datatrove:curly bracket": "curly_bracket",
    "fineweb_quality:empty text": "empty",
    "fineweb_quality:share of lines with an end mark": "line_punct_ratio",
    "fineweb_quality:share of short lines": "short_line_ratio",
    "fineweb_quality:share of characters in duplicate lines": "char_dup_ratio",
    "fineweb_quality:newlines per word": "list_ratio",
}
