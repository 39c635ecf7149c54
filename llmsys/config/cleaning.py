"""Sections that say how documents are read and cleaned: reading, extraction, URL filter, Unicode
repair, personal data.

Reading: the format of a file (WARC, WET, ARC, jsonl, parquet, Arrow; gzip, zstd, lz4, bzip2, xz or
plain; zip archives; PDF) is detected from its bytes, that of CSV and TSV from its name. Keys and
endpoints of remote storage come from the environment (AWS_*, FSSPEC_S3_*), because the config is
written into the dataset and must not contain secrets.

URL filters run first, because they need no extraction. Unicode is repaired before the language is
identified, and personal data is replaced in kept documents only.

Invariants:
- Limits count bytes, nodes and attributes, never seconds: the load of a machine changes no result.
- A page above a limit is dropped with the limit, its value and its threshold.
"""

from functools import partial
from operator import eq, not_
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from llmsys.config.custom_rules import EntryListConfig
from llmsys.config.python_code import PythonCode
from llmsys.config.section import Section, raise_violation


class _BaseExtractorConfig(Section):
    """Limits per page of all extractors."""

    max_page_bytes: int = Field(
        5_242_880,
        ge=1,
        description="Maximum bytes of HTML; longer pages are skipped and counted. Common Crawl "
        "truncates at 5 MiB.",
    )
    max_nodes: int = Field(
        1_000_000,
        ge=1,
        description="Maximum nodes (elements, texts and attributes) that the parser may create, "
        "about 400 B each.",
    )
    max_attributes: int = Field(
        1_000, ge=1, description="Maximum attributes of one element; parsing is quadratic in them."
    )


class ArticleExtractorConfig(_BaseExtractorConfig):
    """Main content of news, posts, forums and manuals, with the structure of lists, tables and
    code.
    """

    kind: Literal["article"] = "article"
    format: Literal["text", "markdown"] = Field(
        "text",
        description="Form of the documents. markdown: headings, lists, tables and fenced code with "
        "its language; language identification and rules see the text form, and lines that rules "
        "remove are removed from the Markdown.",
    )


class ResiliparseExtractorConfig(_BaseExtractorConfig):
    """Resiliparse's plain text (Bevendorff et al. 2018): faster, with more boilerplate."""

    kind: Literal["resiliparse"] = "resiliparse"
    main_content: bool = Field(
        True, description="Extract only the main content, without navigation, footers and banners."
    )
    max_depth: int = Field(
        1_000,
        ge=1,
        description="Maximum nesting depth for main-content extraction; deeper pages are "
        "extracted as full text.",
    )


class TrafilaturaExtractorConfig(_BaseExtractorConfig):
    """Trafilatura (Barbaresi 2021), the extractor of FineWeb: many times slower. Needs the extra
    `trafilatura`.
    """

    kind: Literal["trafilatura"] = "trafilatura"
    favor: Literal["precision", "balance", "recall"] = Field(
        "precision", description="Trade-off of precision and recall; FineWeb uses precision."
    )


class PythonExtractorConfig(PythonCode, _BaseExtractorConfig):
    """An extractor of your own: a class that extends
    `llmsys.data_pipeline.extract.python_extractor.PythonExtractor`.
    """

    kind: Literal["python"] = "python"

    __hash__ = PythonCode.__hash__


ExtractConfig = Annotated[
    ArticleExtractorConfig
    | ResiliparseExtractorConfig
    | TrafilaturaExtractorConfig
    | PythonExtractorConfig,
    Field(discriminator="kind"),
]


_NOTHING = EntryListConfig()


class NoUrlFilter(Section):
    """Filter no pages by URL."""

    kind: Literal["none"] = "none"


class UrlFilterConfig(Section):
    """Drop pages whose URL matches a list. The tests run in datatrove's order; the user supplies
    the lists.
    """

    kind: Literal["lists"] = "lists"
    hosts: EntryListConfig = Field(
        _NOTHING,
        description="Registered domains (with all their hosts) or single hosts to reject; "
        "case-insensitive.",
    )
    urls: EntryListConfig = Field(_NOTHING, description="URLs to reject, compared exactly.")
    hard_words: EntryListConfig = Field(
        _NOTHING, description="Words to reject if one occurs between symbols of the URL."
    )
    soft_words: EntryListConfig = Field(
        _NOTHING, description="Words to reject if more than `max_soft_words` occur."
    )
    max_soft_words: int = Field(
        1, ge=0, description="Maximum number of distinct soft words in a URL."
    )
    substrings: EntryListConfig = Field(
        _NOTHING, description="Substrings to reject in the URL without its symbols."
    )
    allow_list: EntryListConfig = Field(
        _NOTHING,
        description="Registered domains, hosts and URLs to accept regardless of the lists.",
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """The list files."""
        lists = (
            self.hosts,
            self.urls,
            self.hard_words,
            self.soft_words,
            self.substrings,
            self.allow_list,
        )
        return tuple(path for entries in lists for path in entries.files)


UrlConfig = Annotated[NoUrlFilter | UrlFilterConfig, Field(discriminator="kind")]


class NoUnicodeRepair(Section):
    """Leave the extracted text unchanged."""

    kind: Literal["none"] = "none"


class FtfyRepairConfig(Section):
    """Repair text decoded with the wrong encoding with ftfy (Speer 2019), with datatrove's
    settings.

    Fixes mojibake and C1 controls, and removes lone surrogates, control characters and terminal
    escapes. Quotes, ligatures, character width and line endings are unchanged.
    """

    kind: Literal["ftfy"] = "ftfy"
    html_entities: Literal["auto", "keep"] = Field(
        "auto",
        description="HTML entities such as `&eacute;`. auto: decode them up to the first line "
        "that contains `<`. keep: do not decode.",
    )
    normalization: Literal["none", "NFC"] = Field(
        "none", description="Normalization after the repair. NFC: composed characters."
    )


class NfcNormalizationConfig(Section):
    """Apply Unicode NFC composition only."""

    kind: Literal["nfc"] = "nfc"


UnicodeConfig = Annotated[
    NoUnicodeRepair | FtfyRepairConfig | NfcNormalizationConfig, Field(discriminator="kind")
]


PiiKind = Literal["email", "ip", "phone", "iban", "card", "national_id", "secret"]


class NoPiiReplacement(Section):
    """Replace nothing."""

    kind: Literal["none"] = "none"


class PiiReplacementConfig(Section):
    """Replace personal data: e-mail addresses, public IP addresses (IPv4 and IPv6), telephone
    numbers, bank accounts (IBAN) and payment cards with right check digits, national ids (of China,
    Italy and France, and of Brazil with its dots), and secrets: access keys with a known beginning
    and private keys in PEM.

    A replacement depends on the match, the seed and, with `consistency: document`, the document id.
    It never depends on earlier replacements, so results are independent of workers and file order.
    """

    kind: Literal["replace"] = "replace"
    kinds: tuple[PiiKind, ...] = Field(
        ("email", "ip"), description="Kinds of personal data to replace; FineWeb: email and ip."
    )
    replacement: Literal["reserved", "token"] = Field(
        "reserved",
        description="reserved: an address or number that belongs to nobody. token: <EMAIL>, <IP>, "
        "<PHONE>, <IBAN>, <CARD>, <NATIONAL_ID>, <SECRET>.",
    )
    consistency: Literal["match", "document"] = Field(
        "match", description="Scope in which equal matches get equal replacements."
    )
    seed: int = Field(0, ge=0, description="Seed of the replacements.")


PiiConfig = Annotated[NoPiiReplacement | PiiReplacementConfig, Field(discriminator="kind")]


class PythonReaderConfig(PythonCode):
    """A reader of your own: a class that extends
    `llmsys.data_pipeline.readers.python_reader.PythonReader`.
    """

    kind: Literal["python"] = "python"

    __hash__ = PythonCode.__hash__


class NoPdfReader(Section):
    """Read no PDF: a file is one loss, a record of a crawl is no page."""

    kind: Literal["none"] = "none"


class PdfiumConfig(Section):
    """Read the text of PDF with pdfium (the engine of Chromium), in a process of its own. Needs the
    extra `pdf`.

    A PDF that would take more than these limits is a loss with its reason. CPU seconds are those of
    its process, so that the load of a machine does not matter.
    """

    kind: Literal["pdfium"] = "pdfium"
    max_bytes: int = Field(67_108_864, ge=1, description="Maximum bytes of a file.")
    max_pages: int = Field(10_000, ge=1, description="Maximum number of pages.")
    max_memory_bytes: int = Field(
        1_073_741_824, ge=268_435_456, description="Maximum address space of the process."
    )
    max_cpu_seconds: int = Field(
        60, ge=1, description="Maximum CPU seconds of the process: against files made to take days."
    )


PdfConfig = Annotated[NoPdfReader | PdfiumConfig, Field(discriminator="kind")]
_NO_PDF = NoPdfReader()

FieldName = Annotated[str, Field(min_length=1)]
ColumnType = Literal[
    "string",
    "bool",
    "int64",
    "float64",
    "date32",
    "timestamp[s]",
    "timestamp[ms]",
    "timestamp[us]",
    "timestamp[ns]",
    "timestamp[s, tz=UTC]",
    "timestamp[ms, tz=UTC]",
    "timestamp[us, tz=UTC]",
    "timestamp[ns, tz=UTC]",
]


class ReadConfig(Section):
    """Options for reading crawl files and document files."""

    text_field: str = Field(
        "text",
        min_length=1,
        description="Field of JSON lines, CSV, Parquet and Arrow files with the text. a.b: field b "
        "of a.",
    )
    url_field: str = Field(
        "url", description="Field with the URL. A document without it has an empty URL."
    )
    id_field: str = Field(
        "id",
        description="Field with the id. A document without it gets a hash of URL, date and text.",
    )
    date_field: str = Field("date", description="Field with the time of capture.")
    keep_fields: Literal["all", "none"] | tuple[FieldName, ...] = Field(
        "all",
        exclude_if=partial(eq, "all"),  # keys of datasets that were prepared before it
        description="Further fields of JSON lines, CSV, Parquet and Arrow files that become "
        "columns of documents/ and dropped/: all, none, or names; a.b: field b of a.",
    )
    column_types: dict[FieldName, ColumnType] = Field(
        {},
        exclude_if=not_,  # keys of datasets that were prepared before it
        description="Types of columns of CSV and TSV files, by name: a row with another value is "
        "skipped and counted. string keeps spellings such as 007. The types of other columns "
        "follow from all of their values, as pyarrow infers them.",
    )
    on_digest_mismatch: Literal["drop", "count", "ignore"] = Field(
        "drop",
        description="Action if WARC-Block-Digest or WARC-Payload-Digest does not match: drop and "
        "count, keep and count, or do not check.",
    )
    on_truncation: Literal["drop", "count", "ignore"] = Field(
        "count",
        description="Action on a page marked WARC-Truncated, or whose gzip, deflate, zstd, br or "
        "chunked coding ends early: drop and count, keep with a count and a note, or keep "
        "silently.",
    )
    max_attempts: int = Field(
        5,
        ge=1,
        le=100,
        description="Maximum attempts of a read from remote storage, with delays of 0.5, 1, 2, … "
        "s.",
    )
    pdf: PdfConfig = Field(
        _NO_PDF,
        exclude_if=partial(eq, _NO_PDF),  # keys of datasets that were prepared before it
        description="PDF files, and records of crawls with application/pdf. Their text is a "
        "document, with a form feed between pages.",
    )
    reader: PythonReaderConfig | None = Field(
        None,
        exclude_if=not_,  # keys of datasets that were prepared before it
        description="A reader of your own for the files, which are then not split into blocks. "
        "Null: by their format.",
    )

    @field_validator("column_types")
    @classmethod
    def _check_column_types(
        cls, column_types: dict[str, ColumnType], info: ValidationInfo
    ) -> dict[str, ColumnType]:
        for key in ("text_field", "url_field", "id_field", "date_field"):
            if (name := info.data.get(key)) in column_types:
                raise_violation(
                    f"column_types.{name}",
                    f"{column_types[name]} for {name!r}, which data.read.{key} reads as text. "
                    "Leave it out here.",
                )
        return column_types

    def __hash__(self) -> int:
        """Return a hash; pydantic's needs fields that are hashable."""
        return hash(self.model_dump_json())
