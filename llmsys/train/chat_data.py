"""Data of runs over chats: the meaning of stored ids, the chat template, and tokenizers with
places of their tokens.
"""

from pathlib import Path

from llmsys.config.data import list_dataset_folders
from llmsys.config.run import RunConfig
from llmsys.config.tokenizer import NoTokenizer, PythonTokenizerConfig
from llmsys.errors import ConfigError
from llmsys.train.run_data import (
    RunData,
    get_configured_tokenizer_path,
    get_tokenizer_path,
)
from llmsys.train.run_files import TOKENIZER, find_kept_tokenizer
from llmsys.vocabulary.chat_template import TEMPLATE_NAME
from llmsys.vocabulary.chat_tokens import StoredChats
from llmsys.vocabulary.tokenizer import TextTokenizer, load_tokenizer


def get_stored_chats(config: RunConfig, dataset: RunData) -> StoredChats | None:
    """Return the meaning of the ids in the token files of chats; None if no source has chats.

    Args:
        config: the config of the run.
        dataset: its data.

    Returns:
        How stored ids are split, or None.

    Raises:
        ConfigError: another objective, or windows without borders of documents, would not keep
            answers apart.
    """
    names = [name or config.data.kind for name, one in zip(dataset.names, dataset.sources,
        strict=True)
             if one.manifest.answers]  # fmt: skip
    if not names:
        return None
    if config.objective.kind != "next_token":
        raise ConfigError(
            f"objective.kind={config.objective.kind} has no loss on answers alone, which the "
            f"chats of {names[0]} need. Use a decoder with objective.kind=next_token, or other "
            "data."
        )
    if config.batch.attention_scope != "document":
        raise ConfigError(
            f"batch.attention_scope={config.batch.attention_scope} would show the chats of "
            f"{names[0]} each other. Use document."
        )
    return StoredChats(dataset.tokenizer.vocab_size, dataset.tokenizer.eos_id)


def load_file_tokenizer(config: RunConfig, purpose: str) -> TextTokenizer:
    """Load a tokenizer that is a SentencePiece model or a tokenizer.json.

    Args:
        config: the config of the run.
        purpose: the setting that needs one, for the message.

    Returns:
        The tokenizer, which knows the places of its tokens in a text.

    Raises:
        ConfigError: the tokenizer is one of Python code, or there is none.
        DataError: the file is missing.
    """
    if isinstance(config.tokenizer, NoTokenizer | PythonTokenizerConfig):
        raise ConfigError(
            f"tokenizer.kind={config.tokenizer.kind} has no places of control tokens in a text, "
            f"which {purpose} needs. Use a SentencePiece model or a tokenizer.json, or leave it "
            "out."
        )
    return load_tokenizer(get_tokenizer_path(config), getattr(config.tokenizer, "eos_token", None))


def get_template_folder(config: RunConfig) -> Path:
    """Find the folder of the run's chat template.

    Args:
        config: the config of the run.

    Returns:
        The tokenizer folder of the run, once it has a template; that of its chats, else of its
        tokenizer, where there may be none.
    """
    kept = config.run.folder / TOKENIZER
    if find_kept_tokenizer(config.run.folder) is not None and (kept / TEMPLATE_NAME).is_file():
        return kept
    return get_configured_template_folder(config)


def get_configured_template_folder(config: RunConfig) -> Path:
    """Find the folder of the chat template that the config names.

    Args:
        config: the config of the run.

    Returns:
        The tokenizer folder of its chats, else of its tokenizer, where there may be no template.
    """
    folders = [folder / "tokenizer" for folder in list_dataset_folders(config.data)]
    own = get_configured_tokenizer_path(config).parent
    return next((folder for folder in folders if (folder / TEMPLATE_NAME).is_file()), own)
