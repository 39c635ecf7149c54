"""Open and check the data of a run: one dataset or the sources of a mixture, with their common
tokenizer.

Reads manifests, token shards and the tokenizer. Data, tokenizer and model that do not fit each
other are rejected.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from llmsys.config.data import (
    ChatConfig,
    CrawlConfig,
    DataConfig,
    LabelledTextConfig,
    PairsConfig,
    TokensConfig,
    list_dataset_folders,
)
from llmsys.config.images import ImagesConfig
from llmsys.config.mixture import MixtureConfig
from llmsys.config.run import RunConfig
from llmsys.config.tokenizer import (
    FileTokenizerConfig,
    NoTokenizer,
    PythonTokenizerConfig,
    SentencePieceConfig,
    WordPieceConfig,
)
from llmsys.config.train import GenerationConfig
from llmsys.data.images import PixelTokenizer
from llmsys.dataset.manifest import combine_fingerprints, load_manifest
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.errors import ConfigError, DataError
from llmsys.train.run_files import find_kept_tokenizer
from llmsys.vocabulary.tokenizer import CODE_NAME, Tokenizer, find_model_file, load_tokenizer


@dataclass(frozen=True)
class RunData:
    """One split of all data of a run. A single dataset has `names` ("",)."""

    names: tuple[str, ...]
    sources: tuple[TokenShards, ...]
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """A hash that changes with any token and with the tokenizer."""
        return combine_fingerprints([source.fingerprint for source in self.sources])

    def to_identity(self) -> dict[str, Any]:
        """Return the data's part of a run's identity, so that another dataset on resume is a
        readable difference.
        """
        counts = [
            {
                "fingerprint": one.fingerprint,
                "documents": one.num_documents,
                "tokens": one.num_tokens,
            }
            for one in self.sources
        ]
        sizes = (
            {str(number): count for number, count in enumerate(counts)}
            if len(counts) > 1
            else counts[0]
        )
        return {
            "data_fingerprint": self.fingerprint,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "data": sizes,
        }


def get_mixture(data: DataConfig) -> MixtureConfig | None:
    """Return the mixture of sources that a run reads, or None for a single dataset."""
    match data:
        case MixtureConfig():
            return data
        case (
            CrawlConfig()
            | TokensConfig()
            | ChatConfig()
            | PairsConfig()
            | LabelledTextConfig()
            | ImagesConfig()
        ):
            return None
        case unreachable:
            assert_never(unreachable)


def open_run_data(config: RunConfig, split: str) -> RunData:
    """Open one split of the config's data.

    Args:
        config: the config of the run.
        split: `train` or `heldout`.

    Returns:
        The token shards with their tokenizer. Sources of a mixture without documents in the split
        are left out.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
        DataError: the data are missing or damaged, or were prepared with another tokenizer.
    """
    for folder in list_dataset_folders(config.data):
        # first: `llmsys prepare` makes the tokenizer too, and its error would mislead
        load_manifest(folder)
    tokenizer = load_run_tokenizer(config)
    if (mixture := get_mixture(config.data)) is not None:
        named = _open_mixture_sources(mixture, split, tokenizer)
    else:
        named = {"": open_tokens(config.data.folder, split)}
        if not isinstance(config.data, ImagesConfig):
            named[""].require_tokenizer(tokenizer.fingerprint)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's "
            f"{tokenizer.vocab_size} pieces. Set model.vocab_size={tokenizer.vocab_size} or more."
        )
    return RunData(tuple(named), tuple(named.values()), tokenizer)


def count_evaluated_tokens(config: RunConfig) -> int:
    """Return the held-out tokens that an evaluation of the run has at most.

    Args:
        config: the config of the run.
    """
    folders = list_dataset_folders(config.data)
    splits = [load_manifest(folder).splits.get("heldout") for folder in folders]
    heldout = sum(0 if split is None else split.tokens for split in splits)
    return min(heldout, config.evaluation.max_tokens or heldout)


def _open_mixture_sources(
    mixture: MixtureConfig, split: str, tokenizer: Tokenizer
) -> dict[str, TokenShards]:
    """Return the sources of a mixture by name. Training needs documents in all of them,
    evaluation in one.
    """
    found = {}
    for source in mixture.sources:
        manifest = load_manifest(source.folder)
        theirs = manifest.tokenizer_fingerprint
        if manifest.splits and theirs != tokenizer.fingerprint:
            raise DataError(
                f"source {source.title} ({source.folder}) was made by tokenizer {theirs}, but the "
                f"run has {tokenizer.fingerprint}, so ids have another meaning. Prepare "
                f"{source.folder} again with tokenizer.kind=file "
                f"tokenizer.path={mixture.folder / 'tokenizer'}."
            )
        listed = manifest.splits.get(split)  # type: ignore[call-overload]
        if split == "train" or (listed is not None and listed.documents):
            found[source.title] = open_tokens(source.folder, split)
    # No source has documents in the split: opening one raises the error that explains it.
    return found or {mixture.sources[0].title: open_tokens(mixture.sources[0].folder, split)}


def open_first_source(config: RunConfig, split: str) -> tuple[TokenShards, Tokenizer]:
    """Open one split; of a mixture, that of the first source.

    Args:
        config: the config of the run.
        split: `train` or `heldout`.

    Returns:
        The token shards and their tokenizer.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
        DataError: the data are missing or damaged, or were prepared with another tokenizer.
    """
    dataset = open_run_data(config, split)
    return dataset.sources[0], dataset.tokenizer


def load_run_tokenizer(config: RunConfig) -> Tokenizer:
    """Load the tokenizer of the config.

    Args:
        config: the config of the run.

    Returns:
        The tokenizer; of images, one without text.

    Raises:
        DataError: the file is missing, or no token that ends a document is known.
    """
    if isinstance(config.tokenizer, NoTokenizer):
        return PixelTokenizer()
    if isinstance(config.tokenizer, PythonTokenizerConfig):
        from llmsys.vocabulary.python_tokenizer import load_python_tokenizer, read_python_tokenizer

        own = load_python_tokenizer(config.tokenizer)
        for made in (
            folder / "tokenizer" / CODE_NAME for folder in list_dataset_folders(config.data)
        ):
            if made.is_file() and read_python_tokenizer(made).fingerprint != own.fingerprint:
                raise DataError(
                    f"tokenizer: the options of {config.tokenizer.path} did not prepare "
                    f"{made.parent.parent}. Restore them, or prepare the dataset again: llmsys "
                    "prepare CONFIG"
                )
        return own
    return load_tokenizer(get_tokenizer_path(config), getattr(config.tokenizer, "eos_token", None))


def get_tokenizer_path(config: RunConfig) -> Path:
    """Return the path of the run's tokenizer.

    Args:
        config: the config of the run.

    Returns:
        The copy in the run folder, once there is a checkpoint; before that the one of the config.
    """
    return find_kept_tokenizer(config.run.folder) or get_configured_tokenizer_path(config)


def get_configured_tokenizer_path(config: RunConfig) -> Path:
    """Return the path of the config's tokenizer.

    Args:
        config: the config of the run.

    Returns:
        The user's file, or the one that `llmsys prepare` trained in the dataset's folder.
    """
    match config.tokenizer:
        case FileTokenizerConfig() as settings:
            return find_model_file(settings.path)
        case SentencePieceConfig() | NoTokenizer():
            return config.data.folder / "tokenizer" / "tokenizer.model"
        case WordPieceConfig():
            return config.data.folder / "tokenizer" / "tokenizer.json"
        case PythonTokenizerConfig():
            return config.data.folder / "tokenizer" / CODE_NAME
        case unreachable:
            assert_never(unreachable)


def get_prefix_ids(settings: GenerationConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that precede every text that is continued or scored.

    Args:
        settings: `generation`, whose `prefix_pieces` lists pieces.
        tokenizer: the tokenizer of the run.

    Returns:
        Token ids; the end-of-document id by default, as in training.

    Raises:
        ConfigError: the tokenizer has no such piece.
    """
    if settings.prefix_pieces is None:
        return [tokenizer.eos_id]
    ids = {piece: tokenizer.find_piece_id(piece) for piece in settings.prefix_pieces}
    for piece, token in ids.items():
        if token is None:
            raise ConfigError(
                f"generation.prefix_pieces has {piece}, which is not a token of the tokenizer. "
                "Correct it, or leave it out for the prefix used in training."
            )
    return [token for piece in settings.prefix_pieces if (token := ids[piece]) is not None]
