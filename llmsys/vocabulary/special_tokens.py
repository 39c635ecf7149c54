"""Read the special tokens of a tokenizer.json from the configuration files in its folder.

Reads: tokenizer_config.json and special_tokens_map.json, which name tokens (`eos_token`, a string
or an object with `content`), then generation_config.json and config.json, which have ids
(`eos_token_id`, a number or a list, of which the first counts).

Invariants:
- The first file that names a token of this vocabulary wins.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from llmsys.errors import DataError

CONFIG_NAME = "tokenizer_config.json"
NAMING = (CONFIG_NAME, "special_tokens_map.json")
COUNTING = ("generation_config.json", "config.json")
# What SentencePiece and the models made from it call the pieces of single bytes.
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class EncodedSpans(NamedTuple):
    """Ids, and for each its first character in the text and the one after its last."""

    ids: list[int]
    begins: list[int]
    ends: list[int]


def read_special_tokens(
    folder: Path, id_of: Callable[[str], int | None], piece_of: Callable[[int], str | None]
) -> dict[str, str]:
    """Read the special tokens that the configuration files of a tokenizer define.

    Args:
        folder: The folder of the tokenizer.
        id_of: Returns the id of a piece, or None.
        piece_of: Returns the piece of an id, or None.

    Returns:
        {role: token} for the roles of `ROLES` that the files define.

    Raises:
        DataError: A file is not JSON.
    """
    found: dict[str, str] = {}
    for name in NAMING:
        values = read_json_object(folder / name)
        for role in ROLES:
            piece = values.get(f"{role}_token")
            piece = piece.get("content") if isinstance(piece, dict) else piece
            if isinstance(piece, str) and id_of(piece) is not None:
                found.setdefault(role, piece)
    for name in COUNTING:
        values = read_json_object(folder / name)
        for role in ROLES:
            token = values.get(f"{role}_token_id")
            # Llama 3's generation_config.json lists several ends of a text
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int) and token >= 0 and (named := piece_of(token)) is not None:
                found.setdefault(role, named)
    return found


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Args:
        file: The file. It may be missing.

    Returns:
        The object. Empty when there is no such file.

    Raises:
        DataError: The file is not JSON or holds no object.
    """
    if not file.is_file():
        return {}
    try:
        # utf-8-sig: some editors write a byte order mark, which JSON does not allow
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}). Download it again, or remove it.") from None
    if not isinstance(values, dict):
        raise DataError(f"{file} holds no JSON object. Download it again, or remove it.")
    return values
