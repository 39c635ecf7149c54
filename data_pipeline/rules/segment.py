"""How the words of a language are found, from what its profile says.

Reads the `words` of a profile, gives a chunk splitter for `WordSplitter`.
"""

from data_pipeline.rules.character_words import CharacterTokenizer
from data_pipeline.rules.chunk import SpacyTokenizer
from data_pipeline.rules.chunk_memory import WordTokenizer
from data_pipeline.rules.dictionary_words import DictionaryTokenizer
from llmsys.config.language_profile import CharacterWordsConfig, DictionaryWordsConfig, SpacedWordsConfig, Words


def build_word_tokenizer(words: Words) -> WordTokenizer:
    """The splitter that a profile asks for."""
    match words:
        case SpacedWordsConfig():
            return SpacyTokenizer(words.rules)
        case CharacterWordsConfig():
            return CharacterTokenizer()
        case DictionaryWordsConfig():
            return DictionaryTokenizer(words.dictionary)
