"""Where one token came from: its document, crawl file, record offset, URL, and the text around it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.errors import DataError
from llmsys.manifest import load_manifest
from llmsys.record_location import format_record_place
from llmsys.token_shards import open_tokens, read_batches
from llmsys.tokenizer import load_tokenizer

AROUND = 40
"""Tokens shown on each side."""


@dataclass(frozen=True)
class TokenLineage:
    """A token by its number in a split; `url` is None when its document is gone, and empty when that has none."""

    split: str
    token: int
    document: int
    token_of_document: int
    id: str
    file: str
    offset: int
    url_hash: str
    url: str | None
    before: str
    piece: str
    behind: str


def locate_token(folder: Path, name: str) -> TokenLineage:
    """Find a token by its name "train:12345", counted from 0 through all files; DataError when there is none."""
    split, _, number = name.partition(":")
    if not number.isdigit():
        raise DataError(f"--token {name} names no token. Write the split and a number from 0 on, such as train:12345.")
    shards, token = open_tokens(folder, split), int(number)
    ends = np.cumsum(shards.lengths)
    if token >= ends[-1]:
        raise DataError(f"--token {name}: split {split} has {int(ends[-1]):,} tokens. Use a smaller number.")
    document = int(np.searchsorted(ends, token, side="right"))
    place = token - int(ends[document] - shards.lengths[document])
    tokens = shards.get_tokens(document).tolist()
    lineage = shards.get_lineage(document)
    decode = load_tokenizer(folder / "tokenizer").decode
    return TokenLineage(
        split=split,
        token=token,
        document=document,
        token_of_document=place,
        id=str(lineage["id"]),
        file=str(lineage["file"]),
        offset=int(lineage["offset"]),
        url_hash=f"{int(lineage['url_hash']):016x}",
        url=_find_url(folder, str(lineage["id"])),
        before=decode(tokens[max(0, place - AROUND) : place]),
        piece=decode(tokens[place : place + 1]),
        behind=decode(tokens[place + 1 : place + 1 + AROUND]),
    )


def format_token_lineage(place: TokenLineage) -> str:
    """A few lines for people."""
    return (
        f"token {place.token:,} of {place.split} is token {place.token_of_document:,} of document {place.document:,}\n"
        f"  id      {place.id}\n"
        f"  record  {format_record_place(place.file, place.offset)}\n"
        f"  url     {_describe_url(place.url)}  (xxh64 {place.url_hash})\n"
        f"  text    {place.before}⟦{place.piece}⟧{place.behind}"
    )


def _describe_url(url: str | None) -> str:
    if url is None:
        return "(its document is gone)"
    return url or "(it has none)"


def _find_url(folder: Path, name: str) -> str | None:
    for entry in load_manifest(folder).documents.files:
        path = folder / "documents" / entry.name
        for batch in read_batches(path) if path.is_file() and path.suffix == ".arrow" else ():
            row: Any = batch.column("id").index(name).as_py()
            if row >= 0:
                return str(batch.column("url")[row].as_py() or "") if "url" in batch.schema.names else ""
    return None
