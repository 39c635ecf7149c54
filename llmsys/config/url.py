"""What a YAML file can say about URLs: which pages are refused by their address, before anything is spent on them.

Reads `llmsys.config.entry_list`, gives the tagged union `UrlConfig`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.entry_list import EntryListConfig
from llmsys.config.section import Section

_NOTHING = EntryListConfig()


class NoUrlFilter(Section):
    """No page is refused by its URL."""

    kind: Literal["none"] = "none"


class UrlFilterConfig(Section):
    """Pages whose URL is listed are refused, test by test in datatrove's order; the lists are the user's."""

    kind: Literal["lists"] = "lists"
    hosts: EntryListConfig = Field(
        _NOTHING, description="Registered domains, with all their hosts, or single hosts; letter case does not matter."
    )
    urls: EntryListConfig = Field(_NOTHING, description="Whole URLs, compared character by character.")
    hard_words: EntryListConfig = Field(
        _NOTHING, description="Words of which one between symbols of the URL is enough."
    )
    soft_words: EntryListConfig = Field(_NOTHING, description="Words of which more than `max_soft_words` are too many.")
    max_soft_words: int = Field(1, ge=0, description="Distinct soft words that a URL may hold.")
    substrings: EntryListConfig = Field(
        _NOTHING, description="Letters and digits that the URL may not hold once its symbols are removed."
    )
    allow_list: EntryListConfig = Field(
        _NOTHING, description="Registered domains, hosts and whole URLs that no list refuses."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """The list files."""
        lists = (self.hosts, self.urls, self.hard_words, self.soft_words, self.substrings, self.allow_list)
        return tuple(path for one in lists for path in one.files)


UrlConfig = Annotated[NoUrlFilter | UrlFilterConfig, Field(discriminator="kind")]
