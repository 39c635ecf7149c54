"""What a SentencePiece model file says about itself, and the same model without its normaliser.

Reads the bytes of a tokenizer.model (a protocol buffer: sentencepiece_model.proto of the library); gives
`parse_model_facts` and `remove_normalizer`. The library has no calls for these facts, and its protocol classes need the
package protobuf.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# Field numbers of ModelProto, TrainerSpec and NormalizerSpec.
_TRAINER, _NORMALIZER = 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_RULES, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE = 2, 3, 4, 5
_KINDS: dict[int, Literal["unigram", "bpe", "word", "char"]] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_EIGHT_BYTES, _LENGTH = 1, 2

Value = int | memoryview


@dataclass(frozen=True)
class SentencePieceFacts:
    """How a model was trained and what it does to a text before it cuts it into pieces.

    Attributes:
        has_rules: characters are replaced (NFKC and the like); False for the normalisation "identity".
        adds_prefix: a space is put before a text.
        trims_spaces: spaces at both ends go, runs become one.
        escapes_spaces: a space is written ▁ in pieces.
        space_ends_word: ▁ stands behind a word in place of before it.
    """

    kind: Literal["unigram", "bpe", "word", "char"]
    byte_fallback: bool
    space_ends_word: bool
    has_rules: bool
    adds_prefix: bool
    trims_spaces: bool
    escapes_spaces: bool


def parse_model_facts(model: bytes) -> SentencePieceFacts:
    """Read the facts of a serialised model; what a file leaves out has the library's default."""
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for field, value in _iter_fields(memoryview(model)):
        if field in (_TRAINER, _NORMALIZER) and isinstance(value, memoryview):
            (trainer if field == _TRAINER else normalizer).update(_iter_fields(value))
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
    """The same pieces for text that is normalised already: no rules, no prefix, every space kept.

    In a protocol buffer a field that comes again overrides the first, so the change is an addition at the end.
    """
    name = b"identity"
    override = bytes([1 << 3 | _LENGTH, len(name), *name, _RULES << 3 | _LENGTH, 0, _DUMMY_PREFIX << 3, 0])
    override += bytes([_EXTRA_SPACES << 3, 0])
    return model + bytes([_NORMALIZER << 3 | _LENGTH, len(override)]) + override


def _iter_fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield (field number, value) of one message."""
    place = 0
    while place < len(data):
        key, place = _parse_varint(data, place)
        match key & 7:
            case 0:
                value, place = _parse_varint(data, place)
                yield key >> 3, value
            case 2:
                size, place = _parse_varint(data, place)
                yield key >> 3, data[place : place + size]
                place += size
            case wire:
                place += 8 if wire == _EIGHT_BYTES else 4


def _parse_varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
