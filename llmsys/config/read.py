"""Section for reading input documents: field names and the handling of damaged records.

The format of a file (WARC, WET, ARC, jsonl, parquet, Arrow; gzip, zstd, lz4 or plain) is detected from its bytes.
Keys and endpoints of remote storage come from the environment (AWS_*, FSSPEC_S3_*), because the config is written
into the dataset and must not contain secrets.
"""

from typing import Literal

from pydantic import Field

from llmsys.config.section import Section


class ReadConfig(Section):
    """Options for reading crawl files and document files."""

    text_field: str = Field(
        "text",
        min_length=1,
        description="Field of JSON lines, Parquet and Arrow files with the text. a.b: field b of a.",
    )
    url_field: str = Field("url", description="Field with the URL. A document without it has an empty URL.")
    id_field: str = Field(
        "id", description="Field with the id. A document without it gets a hash of URL, date and text."
    )
    date_field: str = Field("date", description="Field with the time of capture.")
    on_digest_mismatch: Literal["drop", "count", "ignore"] = Field(
        "drop",
        description="Action if WARC-Block-Digest or WARC-Payload-Digest does not match: drop and count, keep and "
        "count, or do not check.",
    )
    on_truncation: Literal["drop", "count", "ignore"] = Field(
        "count",
        description="Action on a page marked WARC-Truncated, or whose gzip, deflate, zstd, br or chunked coding ends "
        "early: drop and count, keep with a count and a note, or keep silently.",
    )
    max_attempts: int = Field(
        5, ge=1, le=100, description="Maximum attempts of a read from remote storage, with delays of 0.5, 1, 2, … s."
    )
