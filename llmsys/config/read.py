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
