"""Configuration of text extraction (`data.extract:`): the extractor and the limits per page.

Invariants:
- Limits count bytes, nodes and attributes, never seconds: the load of a machine changes no result.
- A page above a limit is dropped with the limit, its value and its threshold.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class _BaseExtractorConfig(Section):
    """Limits per page of all extractors."""

    max_page_bytes: int = Field(
        5_242_880,
        ge=1,
        description="Maximum bytes of HTML; longer pages are skipped and counted. Common Crawl truncates at 5 MiB.",
    )
    max_nodes: int = Field(
        1_000_000,
        ge=1,
        description="Maximum nodes (elements, texts and attributes) that the parser may create, about 400 B each.",
    )
    max_attributes: int = Field(
        1_000, ge=1, description="Maximum attributes of one element; parsing is quadratic in them."
    )


class ArticleExtractorConfig(_BaseExtractorConfig):
    """Main content of news, posts, forums and manuals, with the structure of lists, tables and code."""

    kind: Literal["article"] = "article"


class ResiliparseExtractorConfig(_BaseExtractorConfig):
    """Resiliparse's plain text (Bevendorff et al. 2018): faster, with more boilerplate."""

    kind: Literal["resiliparse"] = "resiliparse"
    main_content: bool = Field(
        True, description="Extract only the main content, without navigation, footers and banners."
    )
    max_depth: int = Field(
        1_000,
        ge=1,
        description="Maximum nesting depth for main-content extraction; deeper pages are extracted as full text.",
    )


class TrafilaturaExtractorConfig(_BaseExtractorConfig):
    """Trafilatura (Barbaresi 2021), the extractor of FineWeb: many times slower. Needs the extra `trafilatura`."""

    kind: Literal["trafilatura"] = "trafilatura"
    favor: Literal["precision", "balance", "recall"] = Field(
        "precision", description="Trade-off of precision and recall; FineWeb uses precision."
    )


ExtractConfig = Annotated[
    ArticleExtractorConfig | ResiliparseExtractorConfig | TrafilaturaExtractorConfig, Field(discriminator="kind")
]
