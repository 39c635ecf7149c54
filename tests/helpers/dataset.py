"""A small tokenized dataset, made in a second: what `prepare` would leave, for tests of
training.
"""

from pathlib import Path

from llmsys.doctor.toy_dataset import VOCABULARY, build_toy_url, write_toy_dataset

__all__ = ["VOCABULARY", "build_toy_url", "make_dataset"]


def make_dataset(
    folder: Path,
    documents: int = 120,
    heldout: int = 12,
    symbols: tuple[str, ...] = (),
) -> Path:
    """Write tokenizer, token shards and manifest; the folder is ready for training."""
    write_toy_dataset(folder, documents, heldout, symbols)
    return folder
