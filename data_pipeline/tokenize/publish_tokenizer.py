"""Publish the files of the dataset's tokenizer atomically, the tokenizer itself last, and remove those of an older one.

Writes `made.json`, the origin of the tokenizer. It is not named tokenizer.json, which is Hugging Face's format.
"""

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import sentencepiece

from llmsys.token_shards import write_bytes_atomically
from llmsys.tokenizer import JSON_NAME, MODEL_NAME, SentencePieceTokenizer, Tokenizer, load_tokenizer

SENTENCEPIECE_FILES = (MODEL_NAME, "tokenizer.vocab", "made.json")


def publish_sentencepiece(folder: Path, model: bytes, made: dict[str, Any]) -> dict[str, Any]:
    """Publish a SentencePiece model.

    Args:
        folder: the tokenizer folder.
        model: bytes of the model file.
        made: origin of the model, for `made.json`.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.
    """
    tokenizer = SentencePieceTokenizer(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = "".join(f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in range(tokenizer.vocab_size))
    facts = _get_tokenizer_facts(tokenizer)
    note = facts | {"sentencepiece": sentencepiece.__version__} | made
    files = {"tokenizer.vocab": pieces.encode(), "made.json": _serialize_json(note), MODEL_NAME: model}
    _publish_files(folder, files, without=(JSON_NAME, "tokenizer_config.json"))
    return facts


def publish_json_tokenizer(folder: Path, file: Path, eos_token: str | None, made: dict[str, Any]) -> dict[str, Any]:
    """Publish a tokenizer.json with its tokenizer_config.json.

    Args:
        folder: the tokenizer folder.
        file: the tokenizer.json.
        eos_token: the end-of-sequence token; None for the one in its files.
        made: origin of the tokenizer, for `made.json`.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.
    """
    from llmsys.hugging_face_tokenizer import build_tokenizer_files

    facts = _get_tokenizer_facts(load_tokenizer(file, eos_token))
    note = facts | {"tokenizers": metadata.version("tokenizers")} | made
    files = {"made.json": _serialize_json(note)} | dict(reversed(build_tokenizer_files(file, eos_token).items()))
    _publish_files(folder, files, without=(MODEL_NAME, "tokenizer.vocab"))
    return facts


def _get_tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }


def _publish_files(folder: Path, files: dict[str, bytes], without: Iterable[str]) -> None:
    for name in without:  # files of an older tokenizer of the other kind
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_bytes_atomically(folder / name, content)


def _serialize_json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()
