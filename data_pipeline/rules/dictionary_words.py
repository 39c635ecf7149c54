"""Words of languages that write none, by a dictionary: jieba for Chinese, SudachiPy for Japanese, PyThaiNLP for Thai.

A chunk splitter for `WordSplitter`. These are the libraries and settings that datatrove finds words with; each is an
extra and is loaded when the first chunk is split. White space parts words in these scripts too, so a chunk is split by
itself: jieba's words are those of the whole text, SudachiPy and PyThaiNLP look beyond a space now and then.
"""

from collections.abc import Callable, Sequence
from functools import cache

from data_pipeline.rules.chunk import SpacyTokenizer
from llmsys.config.language_profile import Dictionary

# SudachiPy refuses more than 49,149 bytes, and datatrove gives it 40,000 at once.
LONGEST_PIECE = 10_000  # characters


class DictionaryTokenizer:
    """Splits chunks by one dictionary."""

    split_chunks = staticmethod(str.split)

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk."""
        segment = _load_segmenter(self._dictionary)
        return [
            [
                word
                for start in range(0, len(chunk), LONGEST_PIECE)
                for found in segment(chunk[start : start + LONGEST_PIECE])
                if (word := found.strip())
            ]
            for chunk in chunks
        ]

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence: spaCy's, which are the same for all languages."""
        return SpacyTokenizer("xx").sentence_marks


@cache
def _load_segmenter(dictionary: Dictionary) -> Callable[[str], list[str]]:
    """The function that gives the words of a text without white space, one per process."""
    match dictionary:
        case "jieba":
            import jieba

            jieba.setLogLevel("ERROR")  # it tells standard error how long its dictionary took
            return lambda text: list(jieba.cut(text))
        case "sudachipy":
            import sudachipy

            library = sudachipy.Dictionary(dict="core")
            make = getattr(library, "tokenizer", None) or library.create  # as it was called before 0.7
            tokenizer = make(mode=sudachipy.SplitMode.A)
            return lambda text: [word.surface() for word in tokenizer.tokenize(text)]
        case "pythainlp":
            from pythainlp.tokenize import word_tokenize

            return lambda text: list(word_tokenize(text, keep_whitespace=False, engine="newmm-safe"))
