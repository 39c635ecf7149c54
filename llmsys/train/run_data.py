"""The data of a run, opened and checked: one dataset or the sources of a mixture, with the tokenizer they share.

Gives the token shards of a split; refuses data, tokenizer and model that do not belong together before one is built.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.config.data import list_dataset_folders
from llmsys.config.mixture import MixtureConfig
from llmsys.config.run import RunConfig
from llmsys.config.train import GenerationConfig
from llmsys.errors import ConfigError, DataError
from llmsys.manifest import combine_fingerprints, load_manifest
from llmsys.token_shards import TokenShards, open_tokens
from llmsys.tokenizer import Tokenizer, find_model_file, load_tokenizer


@dataclass(frozen=True)
class RunData:
    """One split of everything a run reads. Of a single dataset `names` is ("",)."""

    names: tuple[str, ...]
    sources: tuple[TokenShards, ...]
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Changes when any token or the tokenizer changes."""
        return combine_fingerprints([source.fingerprint for source in self.sources])

    def to_identity(self) -> dict[str, Any]:
        """What a checkpoint remembers of the data, so that another dataset on resume is a readable difference."""
        counts = [
            {"fingerprint": one.fingerprint, "documents": one.num_documents, "tokens": one.num_tokens}
            for one in self.sources
        ]
        sizes = {str(number): count for number, count in enumerate(counts)} if len(counts) > 1 else counts[0]
        return {
            "data_fingerprint": self.fingerprint,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "data": sizes,
        }


def open_run_data(config: RunConfig, split: str) -> RunData:
    """One split of the data of this config; of a mixture, of every source that has documents in it.

    Raises ConfigError or DataError when data, tokenizer and model do not fit each other.
    """
    for folder in list_dataset_folders(config.data):
        load_manifest(folder)  # before the tokenizer, which `llmsys prepare` makes too
    tokenizer = load_run_tokenizer(config)
    if isinstance(config.data, MixtureConfig):
        named = _open_mixture_sources(config.data, split, tokenizer)
    else:
        named = {"": open_tokens(config.data.folder, split)}
        named[""].require_tokenizer(tokenizer.fingerprint)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size} pieces. "
            f"Set model.vocab_size={tokenizer.vocab_size} or more."
        )
    return RunData(tuple(named), tuple(named.values()), tokenizer)


def _open_mixture_sources(mixture: MixtureConfig, split: str, tokenizer: Tokenizer) -> dict[str, TokenShards]:
    """The sources of a mixture by name. To train, all must have documents; to evaluate, one is enough."""
    found = {}
    for source in mixture.sources:
        manifest = load_manifest(source.folder)
        theirs = manifest.tokenizer_fingerprint
        if manifest.splits and theirs != tokenizer.fingerprint:
            raise DataError(
                f"source {source.title} ({source.folder}) was made by tokenizer {theirs}, and the run has "
                f"{tokenizer.fingerprint}: the same ids would mean other pieces. Prepare {source.folder} again with "
                f"tokenizer.kind=file tokenizer.path={mixture.folder / 'tokenizer'}."
            )
        listed = manifest.splits.get(split)  # type: ignore[call-overload]
        if split == "train" or (listed is not None and listed.documents):
            found[source.title] = open_tokens(source.folder, split)
    return found or {mixture.sources[0].title: open_tokens(mixture.sources[0].folder, split)}


def open_first_source(config: RunConfig, split: str) -> tuple[TokenShards, Tokenizer]:
    """One split and its tokenizer; of a mixture, the first source's."""
    dataset = open_run_data(config, split)
    return dataset.sources[0], dataset.tokenizer


def load_run_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of this config; DataError when it is not there, or nothing says what ends a document."""
    return load_tokenizer(get_tokenizer_path(config), getattr(config.tokenizer, "eos_token", None))


def get_tokenizer_path(config: RunConfig) -> Path:
    """Where the tokenizer of this config lies: the user's file, or the one `prepare` trained."""
    if config.tokenizer.kind == "file":
        return find_model_file(config.tokenizer.path)
    return config.data.folder / "tokenizer" / "tokenizer.model"


def get_prefix_ids(settings: GenerationConfig, tokenizer: Tokenizer) -> list[int]:
    """The ids that open every text that is continued or scored; ConfigError when the tokenizer has no such piece."""
    if settings.prefix_pieces is None:
        return [tokenizer.eos_id]
    ids = {piece: tokenizer.find_piece_id(piece) for piece in settings.prefix_pieces}
    for piece, token in ids.items():
        if token is None:
            raise ConfigError(
                f"generation.prefix_pieces names {piece}, which is no piece of the tokenizer. Correct it, or leave "
                f"it out to open texts as in training."
            )
    return [token for piece in settings.prefix_pieces if (token := ids[piece]) is not None]
