"""Copy an existing tokenizer into the dataset folder, with the files it needs to work the same
there.

Reads the file that `tokenizer.kind=file` names. Writes tokenizer.model, tokenizer.vocab (for
people) and made.json, or tokenizer.json, tokenizer_config.json and made.json. Of a tokenizer of the
user's own code: tokenizer_code.json.
"""

from functools import partial
from pathlib import Path
from typing import Any

from llmsys.config.python_code import compute_code_digest
from llmsys.config.tokenizer import FileTokenizerConfig, PythonTokenizerConfig
from llmsys.data_pipeline.core.journal import compute_json_digest
from llmsys.data_pipeline.core.staging import get_write_path
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.tokenize.tokenizer_files import (
    CODE_FILES,
    JSON_FILES,
    SENTENCEPIECE_FILES,
    publish_code_tokenizer,
    publish_json_tokenizer,
    publish_sentencepiece,
)
from llmsys.vocabulary.tokenizer import find_model_file, load_tokenizer


def build_copy_task(
    runner: StageRunner, folder: Path, config: FileTokenizerConfig | PythonTokenizerConfig
) -> Task:
    """Build the copy task. It runs again if the file changes or what its neighbouring files say
    about it.
    """
    if isinstance(config, PythonTokenizerConfig):
        outputs = [f"tokenizer/{name}" for name in CODE_FILES]
        described = partial(
            record_tokenizer, folder=get_write_path(folder, "tokenizer"), config=config
        )
        decided_by = [config.model_dump(mode="json"), compute_code_digest(config)]
        return Task("tokenizer/model", decided_by, outputs, described, 1)
    file = find_model_file(config.path)
    depends_on: list[Any] = [config.model_dump(mode="json"), runner.journal.get_input_digest(file)]
    names = SENTENCEPIECE_FILES
    if file.suffix == ".json":
        from llmsys.vocabulary.hugging_face_tokenizer import build_tokenizer_files
        from llmsys.vocabulary.special_tokens import CONFIG_NAME

        depends_on.append(
            compute_json_digest(build_tokenizer_files(file, config.eos_token)[CONFIG_NAME].decode())
        )
        names = JSON_FILES
    job = partial(copy_tokenizer, folder=get_write_path(folder, "tokenizer"), config=config)
    return Task("tokenizer/model", depends_on, [f"tokenizer/{name}" for name in names], job, 1)


def record_tokenizer(
    report: Report, *, folder: Path, config: PythonTokenizerConfig
) -> dict[str, Any]:
    """Write the path and digest of a tokenizer of the user's own code into the dataset folder."""
    return publish_code_tokenizer(folder, config)


def copy_tokenizer(report: Report, *, folder: Path, config: FileTokenizerConfig) -> dict[str, Any]:
    """Copy an existing tokenizer into the dataset folder. Raise DataError if the file is no
    tokenizer.
    """
    load_tokenizer(config.path, config.eos_token)
    file = find_model_file(config.path)
    made = {"config": {"kind": config.kind}}
    if file.suffix == ".json":
        return publish_json_tokenizer(folder, file, config.eos_token, made)
    return publish_sentencepiece(folder, file.read_bytes(), made)
