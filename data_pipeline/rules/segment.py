"""How the words of a language are found, from what its profile says.

Reads the `words` of a profile, gives a chunk splitter for `WordSplitter`.
"""

from data_pipeline.rules.character_words import CharacterChunks
from data_pipeline.rules.chunk import EnglishChunks
from data_pipeline.rules.chunk_memory import ChunkSplitter
from data_pipeline.rules.dictionary_words import DictionaryChunks
from llmsys.config.language_profile import CharacterWords, DictionaryWords, SpacedWords, Words


def chunk_splitter(words: Words) -> ChunkSplitter:
    """The splitter that a profile asks for."""
    match words:
        case SpacedWords():
            return EnglishChunks(words.rules)
        case CharacterWords():
            return CharacterChunks()
        case DictionaryWords():
            return DictionaryChunks(words.dictionary)
