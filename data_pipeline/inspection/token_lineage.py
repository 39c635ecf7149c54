"""Trace one token to its document, crawl file, record offset and URL, with the text around it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.manifest_section import format_record_place
from llmsys.dataset.token_shards import open_tokens, read_batches
from llmsys.errors import DataError
from llmsys.vocabulary.chat_tokens import StoredChats

# Context tokens to show on each side.
AROUND = 40


@dataclass(frozen=True)
class TokenLineage:
    """A token by its number in a split; `url` is None if its document is missing, and "" if that
    has none.
    """

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
    """Find the origin of a token.

    Args:
        folder: the dataset folder.
        name: split and number of the token, such as "train:12345"; counted from 0 over all files of
            the split.

    Returns:
        The document, crawl record and text around the token.

    Raises:
        DataError: if there is no such token.
    """
    split, _, number = name.partition(":")
    if not number.isdigit():
        raise DataError(
            f"--token {name} cannot be parsed. Write the split and a number from 0, such as "
            "train:12345."
        )
    shards = open_tokens(folder, split)
    token = int(number)
    ends = np.cumsum(shards.lengths)
    if token >= ends[-1]:
        raise DataError(
            f"--token {name}: split {split} has {int(ends[-1]):,} tokens. Use a smaller number."
        )
    document = int(np.searchsorted(ends, token, side="right"))
    index = token - int(ends[document] - shards.lengths[document])
    tokenizer = load_dataset_tokenizer(folder / "tokenizer")
    tokens = shards.get_tokens(document).tolist()
    if shards.manifest.answers:
        tokens = (
            StoredChats(tokenizer.vocab_size, tokenizer.eos_id).split(np.array(tokens)).ids.tolist()
        )
    decode = tokenizer.decode
    lineage = shards.get_lineage(document)
    return TokenLineage(
        split=split,
        token=token,
        document=document,
        token_of_document=index,
        id=str(lineage["id"]),
        file=str(lineage["file"]),
        offset=int(lineage["offset"]),
        url_hash=f"{int(lineage['url_hash']):016x}",
        url=_find_url(folder, str(lineage["id"])),
        before=decode(tokens[max(0, index - AROUND) : index]),
        piece=decode(tokens[index : index + 1]),
        behind=decode(tokens[index + 1 : index + 1 + AROUND]),
    )


def format_token_lineage(lineage: TokenLineage) -> str:
    """Format the origin of a token for the terminal.

    Args:
        lineage: the origin.

    Returns:
        Lines of text.
    """
    return (
        f"token {lineage.token:,} of {lineage.split} is token {lineage.token_of_document:,} "
        f"of document {lineage.document:,}\n"
        f"  id      {lineage.id}\n"
        f"  record  {format_record_place(lineage.file, lineage.offset)}\n"
        f"  url     {_describe_url(lineage.url)}  (xxh64 {lineage.url_hash})\n"
        f"  text    {lineage.before}⟦{lineage.piece}⟧{lineage.behind}"
    )


def _describe_url(url: str | None) -> str:
    if url is None:
        return "(its document no longer exists)"
    return url or "(it has none)"


def _find_url(folder: Path, name: str) -> str | None:
    for entry in load_manifest(folder).documents.files:
        path = folder / "documents" / entry.name
        for batch in read_batches(path) if path.is_file() and path.suffix == ".arrow" else ():
            row: Any = batch.column("id").index(name).as_py()
            if row >= 0:
                return (
                    str(batch.column("url")[row].as_py() or "")
                    if "url" in batch.schema.names
                    else ""
                )
    return None
