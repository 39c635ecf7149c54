"""Sections for filtering pages by URL: the tagged union `UrlConfig`.

URL filters run first, because they need no extraction.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.entry_list import EntryListConfig
from llmsys.config.section import Section

_NOTHING = EntryListConfig()


class NoUrlFilter(Section):
    """Filter no pages by URL."""

    kind: Literal["none"] = "none"


class UrlFilterConfig(Section):
    """Drop pages whose URL matches a list. The tests run in datatrove's order; the user supplies the lists."""

    kind: Literal["lists"] = "lists"
    hosts: EntryListConfig = Field(
        _NOTHING, description="Registered domains (with all their hosts) or single hosts to reject; case-insensitive."
    )
    urls: EntryListConfig = Field(_NOTHING, description="URLs to reject, compared exactly.")
    hard_words: EntryListConfig = Field(
        _NOTHING, description="Words to reject if one occurs between symbols of the URL."
    )
    soft_words: EntryListConfig = Field(_NOTHING, description="Words to reject if more than `max_soft_words` occur.")
    max_soft_words: int = Field(1, ge=0, description="Maximum number of distinct soft words in a URL.")
    substrings: EntryListConfig = Field(_NOTHING, description="Substrings to reject in the URL without its symbols.")
    allow_list: EntryListConfig = Field(
        _NOTHING, description="Registered domains, hosts and URLs to accept regardless of the lists."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """The list files."""
        lists = (self.hosts, self.urls, self.hard_words, self.soft_words, self.substrings, self.allow_list)
        return tuple(path for entries in lists for path in entries.files)


UrlConfig = Annotated[NoUrlFilter | UrlFilterConfig, Field(discriminator="kind")]
