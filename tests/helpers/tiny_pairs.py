"""A toy language pair: each English word has one translation, and the order is turned round.
Small, and learnable.
"""

import gzip
import random
from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig

WORDS = {
    "cat": "katze", "dog": "hund", "tree": "baum", "house": "haus", "sees": "sieht",
    "green": "grün", "old": "alt",
    "river": "fluss", "and": "und", "small": "klein", "bright": "hell", "stone": "stein",
    "walks": "geht", "the": "die",
}  # fmt: skip


def build_sentence_pairs(count: int, seed: int, longest: int = 12) -> list[tuple[str, str]]:
    choose = random.Random(seed)
    sources = [
        choose.choices(list(WORDS), k=choose.randrange(2, longest + 1)) for _ in range(count)
    ]
    return [
        (" ".join(words), " ".join(WORDS[word] for word in reversed(words))) for words in sources
    ]


def write_pairs(
    folder: Path, name: str, pairs: list[tuple[str, str]], compress: bool = False
) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for place, side in enumerate(("en", "de")):
        text = "".join(f"{pair[place]}\n" for pair in pairs).encode()
        path = folder / f"{name}.{side}{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(text) if compress else text)
        paths.append(path)
    return paths[0], paths[1]


def write_pairs_config(
    folder: Path, pairs: int = 300, heldout: int = 30, longest: int = 12, **data: Any
) -> RunConfig:
    """Write the files and give a config that prepares them into folder/data."""
    train = write_pairs(folder / "text", "train", build_sentence_pairs(pairs, 1, longest))
    held = write_pairs(folder / "text", "val", build_sentence_pairs(heldout, 2, longest))
    section = {
        "kind": "pairs", "folder": folder / "data", "executor": {"kind": "inline"},
        "source": [train[0]], "target": [train[1]], "heldout_source": [held[0]],
        "heldout_target": [held[1]],
    }  # fmt: skip
    return RunConfig.model_validate(
        {"data": section | data, "tokenizer": {"kind": "sentencepiece", "vocab_size": 320}}
    )
