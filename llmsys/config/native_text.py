"""What a YAML file can say about the rule that asks whether a text is written in the language it was taken for.

Reads nothing, gives `NativeTextConfig`. Scripts and stop words come from the profile of the document's language unless
they are written in the rule.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.named_rule import NamedRuleConfig

Fraction = Annotated[float, Field(ge=0, le=1)]

Script = Literal[
    "Arabic",
    "Armenian",
    "Bengali",
    "Cyrillic",
    "Devanagari",
    "Ethiopic",
    "Georgian",
    "Greek",
    "Gujarati",
    "Gurmukhi",
    "Han",
    "Hangul",
    "Hebrew",
    "Hiragana",
    "Kannada",
    "Katakana",
    "Khmer",
    "Lao",
    "Latin",
    "Malayalam",
    "Myanmar",
    "Oriya",
    "Sinhala",
    "Tamil",
    "Telugu",
    "Thai",
    "Tibetan",
]


class NativeTextConfig(NamedRuleConfig):
    """Letters of the language's scripts, characters that no text holds, common words, and mixed Chinese variants.

    What remains of a page in another script, in a wrong encoding, or made of keywords is dropped here.
    """

    kind: Literal["native_text"] = "native_text"
    scripts: tuple[Script, ...] = Field((), description="Scripts of the language; empty: as the profile says, or any.")
    min_script_share: Fraction = Field(0.5, description="Letters of these scripts / letters. MNBVC asks for 0.7.")
    max_garbage_share: Fraction = Field(
        0.01, description="Characters that come of wrong decoding (U+FFFD, controls, private use) / characters."
    )
    min_stop_word_share: Fraction = Field(0.0, description="Words that are `stop_words` / words.")
    stop_words: tuple[str, ...] = Field((), description="Common words; empty: as the profile says.")
    max_mixed_variant_share: Fraction = Field(
        1.0, description="Characters of the rarer of simplified and traditional Chinese / characters of either."
    )
