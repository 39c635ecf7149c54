"""A small tokenized dataset, made in a second: what `prepare` would leave, for tests of training."""

from pathlib import Path

from llmsys.doctor.toy_data import VOCABULARY, write_toy_dataset, build_toy_url

__all__ = ["VOCABULARY", "make_dataset", "build_toy_url"]


def make_dataset(folder: Path, documents: int = 120, heldout: int = 12, symbols: tuple[str, ...] = ()) -> Path:
    """Write tokenizer, token shards and manifest; the folder is ready for training."""
    write_toy_dataset(folder, documents, heldout, symbols)
    return folder
