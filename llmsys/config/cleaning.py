"""Sections that say how documents are read and cleaned: reading, extraction, URL filter, Unicode repair, personal data.

Reading: the format of a file (WARC, WET, ARC, jsonl, parquet, Arrow; gzip, zstd, lz4 or plain) is detected from its
bytes. Keys and endpoints of remote storage come from the environment (AWS_*, FSSPEC_S3_*), because the config is
written into the dataset and must not contain secrets.

URL filters run first, because they need no extraction. Unicode is repaired before the language is identified, and
personal data is replaced in kept documents only.

Invariants:
- Limits count bytes, nodes and attributes, never seconds: the load of a machine changes no result.
- A page above a limit is dropped with the limit, its value and its threshold.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.custom_rules import EntryListConfig
from llmsys.config.section import Section


class _BaseExtractorConfig(Section):
    """Limits per page of all extractors."""

    max_page_bytes: int = Field(
        5_242_880, ge=1, description="Bytes of HTML; a longer page is skipped and counted. Common Crawl cuts at 5 MiB."
    )
    max_nodes: int = Field(
        1_000_000,
        ge=1,
        description="Elements, texts and attributes that the parser might make of the page at most, about 400 B each.",
    )
    max_attributes: int = Field(
        1_000, ge=1, description="Attributes of one element; each is compared with those before it."
    )


class ArticleExtractorConfig(_BaseExtractorConfig):
    """Main content of news, posts, forums and manuals, with the structure of lists, tables and code."""

    kind: Literal["article"] = "article"


class ResiliparseExtractorConfig(_BaseExtractorConfig):
    """Resiliparse's plain text (Bevendorff et al. 2018): faster, with more boilerplate."""

    kind: Literal["resiliparse"] = "resiliparse"
    main_content: bool = Field(True, description="Leave out navigation, footers, banners and the like.")
    max_depth: int = Field(
        1_000,
        ge=1,
        description="Nested elements; of a deeper page all text stays: finding its main content takes too long.",
    )


class TrafilaturaExtractorConfig(_BaseExtractorConfig):
    """Trafilatura (Barbaresi 2021), the extractor of FineWeb: many times slower. Needs the extra `trafilatura`."""

    kind: Literal["trafilatura"] = "trafilatura"
    favor: Literal["precision", "balance", "recall"] = Field(
        "precision", description="What is preferred in doubt; FineWeb favours precision."
    )


ExtractConfig = Annotated[
    ArticleExtractorConfig | ResiliparseExtractorConfig | TrafilaturaExtractorConfig, Field(discriminator="kind")
]


_NOTHING = EntryListConfig()


class NoUrlFilter(Section):
    """Filter no pages by URL."""

    kind: Literal["none"] = "none"


class UrlFilterConfig(Section):
    """Drop pages whose URL matches a list. The tests run in datatrove's order; the user supplies the lists."""

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
        return tuple(path for entries in lists for path in entries.files)


UrlConfig = Annotated[NoUrlFilter | UrlFilterConfig, Field(discriminator="kind")]


class NoUnicodeRepair(Section):
    """Leave the extracted text unchanged."""

    kind: Literal["none"] = "none"


class FtfyRepairConfig(Section):
    """Repair text decoded with the wrong encoding with ftfy (Speer 2019), with datatrove's settings.

    Fixes mojibake and C1 controls, and removes lone surrogates, control characters and terminal escapes. Quotes,
    ligatures, character width and line endings are unchanged.
    """

    kind: Literal["ftfy"] = "ftfy"
    html_entities: Literal["auto", "keep"] = Field(
        "auto", description="auto: `&eacute;` is decoded up to the first line of a text that has a `<`; keep: never."
    )
    normalization: Literal["none", "NFC"] = Field("none", description="NFC: composed characters, after the repair.")


class NfcNormalizationConfig(Section):
    """Apply Unicode NFC composition only."""

    kind: Literal["nfc"] = "nfc"


UnicodeConfig = Annotated[NoUnicodeRepair | FtfyRepairConfig | NfcNormalizationConfig, Field(discriminator="kind")]


PiiKind = Literal["email", "ip", "phone"]


class NoPiiReplacement(Section):
    """Replace nothing."""

    kind: Literal["none"] = "none"


class PiiReplacementConfig(Section):
    """Replace e-mail addresses, public IP addresses (IPv4 and IPv6) and telephone numbers.

    A replacement depends on the match, the seed and, with `consistency: document`, the document id. It never depends
    on earlier replacements, so results are independent of workers and file order.
    """

    kind: Literal["replace"] = "replace"
    kinds: tuple[PiiKind, ...] = Field(("email", "ip"), description="What is looked for; FineWeb: email and ip.")
    replacement: Literal["reserved", "token"] = Field(
        "reserved",
        description="reserved: an address or number that is reserved for examples; token: <EMAIL>, <IP>, <PHONE>.",
    )
    consistency: Literal["match", "document"] = Field(
        "match", description="Equal matches get equal replacements: everywhere, or only within a document."
    )
    seed: int = Field(0, ge=0, description="Another seed chooses other replacements.")


PiiConfig = Annotated[NoPiiReplacement | PiiReplacementConfig, Field(discriminator="kind")]


class ReadConfig(Section):
    """Options for reading crawl files and document files."""

    text_field: str = Field(
        "text", min_length=1, description="Field of jsonl, parquet and Arrow that holds the text; a.b: b in a."
    )
    url_field: str = Field("url", description="Field with the address; a document without one has an empty address.")
    id_field: str = Field("id", description="Field with the id; without one it follows from address, date and text.")
    date_field: str = Field("date", description="Field with the time of capture.")
    on_digest_mismatch: Literal["drop", "count", "ignore"] = Field(
        "drop",
        description="A page whose WARC-Block-Digest or WARC-Payload-Digest is another: left out and counted, kept and "
        "counted, or never looked at.",
    )
    on_truncation: Literal["drop", "count", "ignore"] = Field(
        "count",
        description="A page whose end is missing, by WARC-Truncated or because its gzip, deflate, zstd, br or chunked "
        "coding stops in the middle: left out and counted, kept and counted with a note, or kept without a word.",
    )
    max_attempts: int = Field(
        5, ge=1, le=100, description="How often a read of remote storage is tried, waiting 0.5, 1, 2, … s."
    )
