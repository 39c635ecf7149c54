"""Copy tokenizers between Hugging Face folders and run folders.

Import: reads tokenizer.json, or a SentencePiece model where there is none, in transformers' order
of preference; writes tokenizer/ in the run folder. A tokenizer that cannot be read is left out with
a warning, because the weights are useful without it.

Export: a tokenizer.json is copied. A SentencePiece model is copied too, with an equivalent
tokenizer.json and tokenizer_config.json for AutoTokenizer. Pieces, their order and their bytes are
exact for models without normalization rules, as ours are. A model with such rules is exported as
tokenizer.model alone, for transformers to convert.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.vocabulary.chat_template import TEMPLATE_NAME
from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer, build_tokenizer_files
from llmsys.vocabulary.special_tokens import CONFIG_NAME, read_json_object
from llmsys.vocabulary.tokenizer import (
    JSON_NAME,
    MODEL_NAME,
    SentencePieceTokenizer,
    load_tokenizer,
)

SENTENCEPIECE = (MODEL_NAME, "spiece.model", "sentencepiece.bpe.model")
MASKS = ("[MASK]", "<mask>")

log = get_logger(__name__)


@dataclass(frozen=True)
class ImportedTokenizer:
    """A copied tokenizer file, and how transformers uses it."""

    file: str
    """Where it is, inside the run folder."""
    fingerprint: str
    prefix_pieces: tuple[str, ...]
    """The pieces that transformers puts before a prompt."""
    mask_token: str | None
    """The piece that stands for a mask, if there is one."""


def import_tokenizer(source: Path, folder: Path) -> ImportedTokenizer | None:
    """Copy the tokenizer of `source` into `folder`/tokenizer; return None without one, or with a
    damaged one.

    A damaged tokenizer is reported in a warning.
    """
    for file, name in _iter_tokenizer_files(source):
        try:
            files = (
                build_tokenizer_files(file, None)
                if name == JSON_NAME
                else {name: file.read_bytes()}
            )
        except DataError as error:
            log.warning("the run is written without this tokenizer: %s", error)
            continue
        place = folder / "tokenizer"
        place.mkdir()
        if (template := source / TEMPLATE_NAME).is_file():
            files[TEMPLATE_NAME] = template.read_bytes()
        for copy, content in files.items():
            (place / copy).write_bytes(content)
        tokenizer = load_tokenizer(place / name)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            opening, mask = tokenizer.opening, tokenizer.special.get("mask")
        else:
            opening, mask = _read_prefix_pieces(file, source), None
        mask = mask or next(
            (piece for piece in MASKS if tokenizer.find_piece_id(piece) is not None), None
        )
        return ImportedTokenizer(f"tokenizer/{name}", tokenizer.fingerprint, opening, mask)
    return None


def _iter_tokenizer_files(source: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, its name in our run folder), the preferred one first."""
    if (source / JSON_NAME).is_file():
        yield source / JSON_NAME, JSON_NAME
    yield from ((source / name, MODEL_NAME) for name in SENTENCEPIECE if (source / name).is_file())


def _read_prefix_pieces(file: Path, source: Path) -> tuple[str, ...]:
    """Return the pieces before every text: for SentencePiece alone, its begin piece.

    It needs to have one, and tokenizer_config.json must not disable it.
    """
    import sentencepiece

    adds = read_json_object(source / CONFIG_NAME).get("add_bos_token", True)
    tokenizer = SentencePieceTokenizer(file.read_bytes())
    if not adds or tokenizer.bos_id < 0:
        return ()
    piece: str = sentencepiece.SentencePieceProcessor(model_file=str(file)).id_to_piece(
        tokenizer.bos_id
    )
    return (piece,)


SPACE = "▁"  # what SentencePiece writes for a space
# a full-width letter and runs of spaces, which normalization rules would change
PROBE = "  Ａ b  "


def write_tokenizer(
    folder: Path,
    model_file: Path,
    longest: int,
    eos_token: str | None = None,
    template: Path | None = None,
) -> None:
    """Write the tokenizer's files.

    Args:
        folder: The folder to write.
        model_file: The tokenizer.
        longest: The model's context in tokens.
        eos_token: As in `load_tokenizer`.
        template: Chat template to copy. None, or no file: there is none.
    """
    if template is not None and template.is_file():
        shutil.copyfile(template, folder / TEMPLATE_NAME)
    if model_file.suffix == ".json":
        _write_json_tokenizer(folder, model_file, longest, eos_token)
        return
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    shutil.copyfile(model_file, folder / "tokenizer.model")
    prefixed = SPACE + PROBE.replace(" ", SPACE)
    # Changed in nothing but its spaces, with a space in front or without.
    exact = processor.normalize(PROBE) in (prefixed, prefixed[1:])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if exact else "LlamaTokenizer",
        "model_max_length": longest,
        # transformers would drop spaces before punctuation as it decodes
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos", "eos", "unk", "pad"):
        if (token := _get_special_id(processor, name)) is not None:
            config[f"{name}_token"] = processor.id_to_piece(token)
    _write_json(folder / "tokenizer_config.json", config)
    if exact:
        _write_json(
            folder / "tokenizer.json",
            _build_tokenizer_json(processor, processor.normalize(PROBE) == prefixed),
        )
    else:
        log.warning("%s normalizes text; it was not converted to tokenizer.json", model_file)


def read_special_token_ids(
    model_file: Path | None, eos_token: str | None = None
) -> dict[str, int | None]:
    """Return the special ids by config.json's names; null where there is no such piece, or no
    tokenizer.
    """
    processor = None
    if model_file is not None:
        if model_file.suffix == ".json":
            tokenizer = HuggingFaceTokenizer(model_file, eos_token)
            ids = {
                role: tokenizer.find_piece_id(piece) for role, piece in tokenizer.special.items()
            }
            return {f"{role}_token_id": ids.get(role) for role in ("bos", "eos", "pad")}
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    return {f"{name}_token_id": _get_special_id(processor, name) for name in ("bos", "eos", "pad")}


def _write_json_tokenizer(folder: Path, file: Path, longest: int, eos_token: str | None) -> None:
    for name, content in build_tokenizer_files(file, eos_token).items():
        (folder / name).write_bytes(content)
    config = folder / CONFIG_NAME
    _write_json(config, read_json_object(config) | {"model_max_length": longest})


def _get_special_id(processor: Any, name: str) -> int | None:
    token: int = -1 if processor is None else getattr(processor, f"{name}_id")()
    return None if token < 0 else token


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _build_tokenizer_json(processor: Any, prefixed: bool) -> dict[str, Any]:
    """Return tokenizer.json, as github.com/huggingface/tokenizers defines it."""
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        # The space that was put in front.
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    special = [
        i for i in range(len(processor)) if processor.is_control(i) or processor.is_unknown(i)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_build_special_token(i, processor.id_to_piece(i)) for i in special],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _build_tokenizer_model(processor),
    }


def _build_special_token(token: int, piece: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": piece, **plain, "special": True}


def _build_tokenizer_model(processor: Any) -> dict[str, Any]:
    pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    scores = [processor.get_score(i) for i in range(len(processor))]
    fallback = any(processor.is_byte(i) for i in range(len(processor)))
    if not _is_bpe(processor, scores):
        vocabulary = [[piece, score] for piece, score in zip(pieces, scores, strict=True)]
        return {
            "type": "Unigram",
            "unk_id": processor.unk_id(),
            "vocab": vocabulary,
            "byte_fallback": fallback,
        }
    return {
        "type": "BPE",
        "unk_token": processor.id_to_piece(processor.unk_id()),
        "fuse_unk": True,
        "byte_fallback": fallback,
        "ignore_merges": False,
        "vocab": {piece: i for i, piece in enumerate(pieces)},
        "merges": _list_merges(processor, pieces, scores),
    }


def _is_bpe(processor: Any, scores: list[float]) -> bool:
    """Return whether the model is BPE, whose scores are minus the piece's rank; unigram's are
    log probabilities.
    """
    plain = [
        i for i in range(len(processor)) if not (processor.is_control(i) or processor.is_byte(i))
    ]
    return all(float(scores[i]).is_integer() for i in plain)


def _list_merges(processor: Any, pieces: list[str], scores: list[float]) -> list[list[str]]:
    """Return every merge of two pieces into a third, in SentencePiece's order of preference."""
    plain = {
        piece: i
        for i, piece in enumerate(pieces)
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    }
    merges = []
    for piece, i in plain.items():
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        pairs = sorted(
            (plain[left], plain[right]) for left, right in cuts if left in plain and right in plain
        )
        merges += [(-scores[i], i, left, right) for left, right in pairs]
    return [[pieces[left], pieces[right]] for _, _, left, right in sorted(merges)]
