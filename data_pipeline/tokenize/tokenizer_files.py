"""Read the settings in a SentencePiece model file, and publish the files of a dataset's tokenizer.

Read the settings in a SentencePiece model file, and remove its normalizer.

Reads the bytes of a tokenizer.model (sentencepiece_model.proto of the library). The library has no
calls for these settings, and its protocol classes need the package protobuf.

Publish the files of the dataset's tokenizer atomically, the tokenizer itself last, and remove those
of an older one.

Writes `made.json`, the origin of the tokenizer. It is not named tokenizer.json, which is Hugging
Face's format.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from llmsys.config.tokenizer import PythonTokenizerConfig, TrainedTokenizerConfig, WordPieceConfig
from llmsys.dataset.token_shards import write_bytes_atomically
from llmsys.storage.stored_formats import TOKENIZER_RECORD, VERSION_KEY
from llmsys.vocabulary.special_tokens import CONFIG_NAME
from llmsys.vocabulary.tokenizer import (
    CODE_NAME,
    JSON_NAME,
    MODEL_NAME,
    ProtobufValue,
    SentencePieceTokenizer,
    Tokenizer,
    find_model_file,
    iter_protobuf_fields,
    load_tokenizer,
)

SENTENCEPIECE_FILES = (MODEL_NAME, "tokenizer.vocab", "made.json")
JSON_FILES = (JSON_NAME, CONFIG_NAME, "made.json")
CODE_FILES = (CODE_NAME, "made.json")


def list_tokenizer_files(config: TrainedTokenizerConfig) -> tuple[str, ...]:
    """List the files that a trained tokenizer has; the first is the tokenizer itself.

    Args:
        config: the tokenizer section of a run.

    Returns:
        Names in the tokenizer folder.
    """
    return JSON_FILES if isinstance(config, WordPieceConfig) else SENTENCEPIECE_FILES


def publish_sentencepiece(folder: Path, model: bytes, made: dict[str, Any]) -> dict[str, Any]:
    """Publish a SentencePiece model.

    Args:
        folder: the tokenizer folder.
        model: bytes of the model file.
        made: origin of the model, for `made.json`.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.
    """
    import sentencepiece  # slow to import

    tokenizer = SentencePieceTokenizer(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = "".join(
        f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n"
        for i in range(tokenizer.vocab_size)
    )
    facts = _get_tokenizer_facts(tokenizer)
    note = (
        {VERSION_KEY: TOKENIZER_RECORD.version}
        | facts
        | {"sentencepiece": sentencepiece.__version__}
        | made
    )
    files = {
        "tokenizer.vocab": pieces.encode(),
        "made.json": _serialize_json(note),
        MODEL_NAME: model,
    }
    _publish_files(folder, files, without=(JSON_NAME, CONFIG_NAME, CODE_NAME))
    return facts


def publish_json_tokenizer(
    folder: Path, file: Path, eos_token: str | None, made: dict[str, Any]
) -> dict[str, Any]:
    """Publish a tokenizer.json with its tokenizer_config.json.

    Args:
        folder: the tokenizer folder.
        file: the tokenizer.json.
        eos_token: the end-of-sequence token; None for the one in its files.
        made: origin of the tokenizer, for `made.json`.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.
    """
    from llmsys.vocabulary.hugging_face_tokenizer import build_tokenizer_files

    facts = _get_tokenizer_facts(load_tokenizer(file, eos_token))
    note = (
        {VERSION_KEY: TOKENIZER_RECORD.version}
        | facts
        | {"tokenizers": metadata.version("tokenizers")}
        | made
    )
    # Reversed: the tokenizer itself comes last.
    files = {"made.json": _serialize_json(note)} | dict(
        reversed(build_tokenizer_files(file, eos_token).items())
    )
    _publish_files(folder, files, without=(MODEL_NAME, "tokenizer.vocab", CODE_NAME))
    return facts


def load_dataset_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a dataset folder, also one of the user's own code.

    Args:
        path: the folder's tokenizer folder, or the file in it.

    Returns:
        The tokenizer.

    Raises:
        DataError: the file is missing or is not a tokenizer, or the code is not the one that
            prepared the dataset.
    """
    file = find_model_file(path)
    if file.name != CODE_NAME:
        return load_tokenizer(file)
    from llmsys.vocabulary.python_tokenizer import read_python_tokenizer

    return read_python_tokenizer(file)


def publish_code_tokenizer(folder: Path, config: PythonTokenizerConfig) -> dict[str, Any]:
    """Publish the path and digest of a tokenizer of the user's own code.

    Args:
        folder: the tokenizer folder.
        config: the tokenizer section of a run.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.
    """
    from llmsys.vocabulary.python_tokenizer import load_python_tokenizer, serialize_python_tokenizer

    facts = _get_tokenizer_facts(load_python_tokenizer(config))
    files = {"made.json": _serialize_json(facts), CODE_NAME: serialize_python_tokenizer(config)}
    _publish_files(folder, files, without=(MODEL_NAME, "tokenizer.vocab", JSON_NAME, CONFIG_NAME))
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


# Field numbers of ModelProto, TrainerSpec and NormalizerSpec.
_TRAINER = 2
_NORMALIZER = 3
_MODEL_TYPE = 3
_SPACE_AS_SUFFIX = 24
_BYTE_FALLBACK = 35
_RULES = 2
_DUMMY_PREFIX = 3
_EXTRA_SPACES = 4
_ESCAPE = 5
_KINDS: dict[int, Literal["unigram", "bpe", "word", "char"]] = {
    1: "unigram",
    2: "bpe",
    3: "word",
    4: "char",
}
_LENGTH = 2


@dataclass(frozen=True)
class SentencePieceFacts:
    """The kind of a model, and its changes to a text before it is cut into pieces.

    Attributes:
        kind: the algorithm.
        byte_fallback: whether unknown characters become bytes.
        space_ends_word: whether ▁ is the end of a word instead of its beginning.
        has_rules: whether characters are replaced (NFKC and the like); False for the normalization
            "identity".
        adds_prefix: whether a space is put before a text.
        trims_spaces: whether outer spaces are removed and runs become one.
        escapes_spaces: whether a space is written ▁ in pieces.
    """

    kind: Literal["unigram", "bpe", "word", "char"]
    byte_fallback: bool
    space_ends_word: bool
    has_rules: bool
    adds_prefix: bool
    trims_spaces: bool
    escapes_spaces: bool


def parse_model_facts(model: bytes) -> SentencePieceFacts:
    """Read the settings of a serialized model; absent fields have the library's defaults."""
    trainer: dict[int, ProtobufValue] = {}
    normalizer: dict[int, ProtobufValue] = {}
    for field, value in iter_protobuf_fields(memoryview(model)):
        if field in (_TRAINER, _NORMALIZER) and isinstance(value, memoryview):
            (trainer if field == _TRAINER else normalizer).update(iter_protobuf_fields(value))
    kind = trainer.get(_MODEL_TYPE, 1)
    rules = normalizer.get(_RULES, b"")
    return SentencePieceFacts(
        kind=_KINDS[kind if isinstance(kind, int) else 1],
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        space_ends_word=bool(trainer.get(_SPACE_AS_SUFFIX, 0)),
        has_rules=not isinstance(rules, int) and len(rules) > 0,
        adds_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        trims_spaces=bool(normalizer.get(_EXTRA_SPACES, 1)),
        escapes_spaces=bool(normalizer.get(_ESCAPE, 1)),
    )


def remove_normalizer(model: bytes) -> bytes:
    """Return the model for text that is normalized already: no rules, no prefix, every space
    kept.
    """
    # In a protocol buffer a repeated field overrides the first one, so the change is appended.
    name = b"identity"
    override = bytes(
        [1 << 3 | _LENGTH, len(name), *name, _RULES << 3 | _LENGTH, 0, _DUMMY_PREFIX << 3, 0]
    )
    override += bytes([_EXTRA_SPACES << 3, 0])
    return model + bytes([_NORMALIZER << 3 | _LENGTH, len(override)]) + override
