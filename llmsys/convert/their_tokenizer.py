"""The tokenizer of a Hugging Face folder, brought into a run folder of ours, with what the run must know about it.

Reads tokenizer.json, or a SentencePiece model where there is none; transformers prefers them in the same order. Writes
tokenizer/ in the run folder. One that cannot be read is said in a warning and left out: weights alone are worth having.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.special_tokens import CONFIG_NAME, read_json_object
from llmsys.tokenizer import JSON_NAME, MODEL_NAME, SentencePieceTokenizer, load_tokenizer
from llmsys.tokenizer_json import HuggingFaceTokenizer, build_tokenizer_files

SENTENCEPIECE = (MODEL_NAME, "spiece.model", "sentencepiece.bpe.model")
MASKS = ("[MASK]", "<mask>")

log = get_logger(__name__)


@dataclass(frozen=True)
class ImportedTokenizer:
    """What was copied, and how transformers would use it."""

    file: str
    """Where it is, inside the run folder."""
    fingerprint: str
    prefix_pieces: tuple[str, ...]
    """The pieces that transformers puts before a prompt."""
    mask_token: str | None
    """The piece that stands for a mask, if there is one."""


def import_tokenizer(source: Path, folder: Path) -> ImportedTokenizer | None:
    """Copy the tokenizer of `source` into `folder`/tokenizer; None, with a warning where one is damaged, without it."""
    for file, name in _iter_tokenizer_files(source):
        try:
            files = build_tokenizer_files(file, None) if name == JSON_NAME else {name: file.read_bytes()}
        except DataError as error:
            log.warning("the run is written without this tokenizer: %s", error)
            continue
        place = folder / "tokenizer"
        place.mkdir()
        for copy, content in files.items():
            (place / copy).write_bytes(content)
        tokenizer = load_tokenizer(place / name)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            opening, mask = tokenizer.opening, tokenizer.special.get("mask")
        else:
            opening, mask = _read_prefix_pieces(file, source), None
        mask = mask or next((piece for piece in MASKS if tokenizer.find_piece_id(piece) is not None), None)
        return ImportedTokenizer(f"tokenizer/{name}", tokenizer.fingerprint, opening, mask)
    return None


def _iter_tokenizer_files(source: Path) -> Iterator[tuple[Path, str]]:
    """(file, its name in a run of ours), the preferred one first."""
    if (source / JSON_NAME).is_file():
        yield source / JSON_NAME, JSON_NAME
    yield from ((source / name, MODEL_NAME) for name in SENTENCEPIECE if (source / name).is_file())


def _read_prefix_pieces(file: Path, source: Path) -> tuple[str, ...]:
    """A SentencePiece model alone: the begin piece, if it has one and tokenizer_config.json does not forbid it."""
    import sentencepiece

    adds = read_json_object(source / CONFIG_NAME).get("add_bos_token", True)
    tokenizer = SentencePieceTokenizer(file.read_bytes())
    if not adds or tokenizer.bos_id < 0:
        return ()
    piece: str = sentencepiece.SentencePieceProcessor(model_file=str(file)).id_to_piece(tokenizer.bos_id)
    return (piece,)
