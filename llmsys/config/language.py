"""What a YAML file can say about languages: which stay, and by whose judgement.

Reads nothing, gives `LanguageConfig`. What the rules need to know of a language stands in a profile, see
`language_profile`.
"""

from typing import Literal

from pydantic import Field

from llmsys.config.base import Section


class LanguageConfig(Section):
    """Which languages stay, and how sure the identification must be."""

    kind: Literal["combined", "py3langid", "cld2"] = Field(
        "combined",
        description="Identifier; each has its model in its package. Both together are right most often.",
    )
    keep: tuple[str, ...] = Field(("en",), description="ISO 639-1 codes that stay; empty: every language stays.")
    minimum_score: float = Field(0.65, ge=0, le=1, description="Probability the best language must exceed.")
    sample_characters: int = Field(4_096, ge=1, description="Characters of the beginning of the text that are read.")
    profiles: dict[str, str] = Field(
        {}, description="Profile by language code, a path or a name, instead of data/languages/CODE."
    )
