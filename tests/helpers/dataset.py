"""A small tokenized dataset, made in a second: what `prepare` would leave, for tests of training."""

from pathlib import Path

from llmsys.doctor.toy_data import VOCABULARY, make_toy_data, toy_url

__all__ = ["VOCABULARY", "make_dataset", "toy_url"]


def make_dataset(folder: Path, documents: int = 120, heldout: int = 12, symbols: tuple[str, ...] = ()) -> Path:
    """Write tokenizer, token shards and manifest; the folder is ready for training."""
    make_toy_data(folder, documents, heldout, symbols)
    return folder
