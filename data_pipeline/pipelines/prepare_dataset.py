"""Prepare a dataset: crawl files to token shards.

    split_inputs ─ extract ─ filter ─ (deduplication) ─ collect ─ (cleaning) ─┐
    ┌─────────────────────────────────────────────────────────────────────────┘
    └ tokenizer ─ encode ─ tokens ─ manifest

Reads the `data` and `tokenizer` sections of a run. Writes the dataset folder. Token ids, chats,
pairs and images have pipelines of their own, such as `pair_pipeline.py`.

Invariants:
    - The bytes do not depend on the number of workers, the order of the inputs, or crashes.
    - A second run processes only what changed.
"""

from pathlib import Path
from typing import cast

from llmsys.config.data import ChatConfig, CrawlConfig, TokensConfig
from llmsys.config.images import ImagesConfig
from llmsys.config.mixture import MixtureConfig
from llmsys.config.run import RunConfig
from llmsys.config.tokenizer import FileTokenizerConfig, PythonTokenizerConfig
from llmsys.data_pipeline.core.journal import require_journal_version
from llmsys.data_pipeline.core.staging import finish_interrupted_publication, remove_partial_files
from llmsys.data_pipeline.graph.resource_files import require_resource_files
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.pipelines.build_manifest import build_manifest, publish_manifest
from llmsys.data_pipeline.pipelines.document_pipeline import DocumentPipeline, Until
from llmsys.data_pipeline.readers.input_files import InputFiles, find_input_files
from llmsys.dataset.manifest import Manifest, load_manifest
from llmsys.errors import ConfigError, DataError, FormatError
from llmsys.storage.local_files import find_folder_url, lock_folder
from llmsys.vocabulary.tokenizer import find_model_file, load_tokenizer


def prepare_dataset(config: RunConfig, until: str = "tokens") -> Manifest:
    """Prepare the dataset of a run.

    Args:
        config: The run.
        until: Last part to make: `documents`, `tokenizer` or `tokens`.

    Returns:
        The manifest of the published dataset.

    Raises:
        DataError: If there is no input, a task fails for good, or another process writes the
            folder.
        ConfigError: For a mixture: its sources have configs of their own.
    """
    data = config.data
    if isinstance(data, MixtureConfig):
        folders = ", ".join(str(source.folder) for source in data.sources)
        raise ConfigError(
            f"data.kind=mixture refers to prepared datasets: {folders}. Run llmsys prepare with "
            "the config of each, all with the same tokenizer."
        )
    if (url := find_folder_url(data.folder)) is not None:
        # most datasets are local
        from llmsys.data_pipeline.pipelines.remote_dataset import open_work_folder

        with open_work_folder(url) as work:
            return prepare_dataset(
                config.model_copy(update={"data": data.model_copy(update={"folder": work})}), until
            )
    inputs = find_input_files(data) if isinstance(data, CrawlConfig) else InputFiles([], {})
    if isinstance(data, CrawlConfig):
        require_resource_files(data)
    if until != "documents" and isinstance(config.tokenizer, FileTokenizerConfig):
        # A missing tokenizer is reported before the crawl is read, not hours later.
        load_tokenizer(config.tokenizer.path, config.tokenizer.eos_token)
    if until != "documents" and isinstance(config.tokenizer, PythonTokenizerConfig):
        from llmsys.vocabulary.python_tokenizer import load_python_tokenizer

        load_python_tokenizer(config.tokenizer)
    with lock_folder(data.folder) as lock:
        _require_known_formats(data.folder)
        remove_partial_files(data.folder)  # we hold the lock, so no other writer lives
        # A publication that was killed midway is completed before anything else changes.
        finish_interrupted_publication(data.folder)
        runner = StageRunner(data.folder, data.executor, lock)
        try:
            manifest = _run_pipeline(config, runner, inputs, cast(Until, until))
        finally:
            runner.close()
        return publish_manifest(runner, manifest)


def _require_known_formats(folder: Path) -> None:
    """Raise FormatError for a folder of another format version, before anything in it changes."""
    try:
        load_manifest(folder)
    except FormatError:
        raise
    except DataError:
        # There is none, or a damaged one, which is written again.
        pass
    require_journal_version(folder)


def _run_pipeline(
    config: RunConfig, runner: StageRunner, inputs: InputFiles, until: Until
) -> Manifest:
    """Run the stages of this kind of data and build the manifest."""
    data, tokenizer = config.data, config.tokenizer
    if isinstance(data, CrawlConfig):
        return build_manifest(
            data, tokenizer, DocumentPipeline(data, tokenizer, runner).run_stages(inputs, until)
        )
    assert not isinstance(data, MixtureConfig)  # prepare_dataset rejects it
    if isinstance(data, TokensConfig):
        from llmsys.data_pipeline.pipelines.token_pipeline import prepare_tokens

        assert isinstance(tokenizer, FileTokenizerConfig)  # a constraint of the config
        return prepare_tokens(data, tokenizer, runner)
    if isinstance(data, ChatConfig):
        from llmsys.data_pipeline.pipelines.chat_pipeline import prepare_chats

        assert isinstance(tokenizer, FileTokenizerConfig)  # a constraint of the config
        return prepare_chats(data, tokenizer, runner)
    if isinstance(data, ImagesConfig):
        from llmsys.data_pipeline.pipelines.image_pipeline import prepare_images

        return prepare_images(data, runner)
    # most runs have no pairs
    from llmsys.data_pipeline.pipelines.pair_manifest import build_pairs_manifest
    from llmsys.data_pipeline.pipelines.pair_pipeline import PairPipeline

    return build_pairs_manifest(
        data, tokenizer, PairPipeline(data, tokenizer, runner).run_stages(until)
    )


def train_tokenizer(config: RunConfig) -> Path:
    """Prepare the dataset of a run up to its tokenizer.

    Args:
        config: The run.

    Returns:
        Path of the tokenizer file.
    """
    prepare_dataset(config, until="tokenizer")
    return find_model_file(config.data.folder / "tokenizer")
