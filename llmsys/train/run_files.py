"""Keep in a run folder the files that its model needs: tokenizer, chat template, and the small
files of the Hugging Face model that it continues. The folder works after it was moved or copied.

Reads: the tokenizer of the dataset or of the user, and the run that `train.init_from` or
`train.branch_from` names. Writes: `tokenizer/` and `hugging_face/` in the run folder.
"""

import shutil
from pathlib import Path

from llmsys.config.export.kept_folder import (
    HUGGING_FACE,
    IMPORT_RECORD_NAME,
    find_run_of_checkpoint,
    has_kept_model,
)
from llmsys.config.run import RunConfig
from llmsys.log import get_logger
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.vocabulary.chat_template import TEMPLATE_NAME
from llmsys.vocabulary.tokenizer import CODE_NAME, JSON_NAME, MODEL_NAME, find_model_file

TOKENIZER = "tokenizer"

log = get_logger(__name__)


def find_kept_tokenizer(run_folder: Path) -> Path | None:
    """Return the tokenizer file that a run folder has; None before the first checkpoint, when
    another one may be chosen, and in folders without one.

    Args:
        run_folder: folder of the run.

    Returns:
        The path of a tokenizer.model or tokenizer.json.
    """
    if not any((run_folder / "checkpoints").glob("step-*")):
        return None
    file = find_model_file(run_folder / TOKENIZER)
    return file if file.name in (MODEL_NAME, JSON_NAME) and file.is_file() else None


def keep_run_files(config: RunConfig, tokenizer: Path, template: Path) -> None:
    """Copy into the run folder what it lacks. For rank 0.

    Args:
        config: the config of the run.
        tokenizer: its tokenizer file; one that is missing or Python code is left out.
        template: its chat template, which may be missing.

    Raises:
        DataError: the run folder cannot be written.
    """
    folder = config.run.folder / TOKENIZER
    if tokenizer.is_file() and tokenizer.name != CODE_NAME and tokenizer.parent != folder:
        for name, content in _read_tokenizer_files(config, tokenizer).items():
            _write_changed(folder / name, content)
    if template.is_file() and template.parent != folder:
        _write_changed(folder / TEMPLATE_NAME, template.read_bytes())
    source = config.train.init_from or config.train.branch_from
    if source is not None:
        _keep_originals(config, find_run_of_checkpoint(source), tokenizer)


def _read_tokenizer_files(config: RunConfig, tokenizer: Path) -> dict[str, bytes]:
    if tokenizer.suffix != ".json":
        return {MODEL_NAME: tokenizer.read_bytes()}
    from llmsys.vocabulary.hugging_face_tokenizer import build_tokenizer_files

    return build_tokenizer_files(tokenizer, getattr(config.tokenizer, "eos_token", None))


def _write_changed(path: Path, content: bytes) -> None:
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, content)


def _keep_originals(config: RunConfig, source: Path, tokenizer: Path) -> None:
    """Copy `hugging_face/` of the run that this one continues, if model and tokenizer are the
    same: its export is then the original with other weights.
    """
    theirs = source / HUGGING_FACE
    ours = config.run.folder / HUGGING_FACE
    if ours.exists() or theirs.is_symlink() or not (theirs / IMPORT_RECORD_NAME).is_file():
        return
    if not has_kept_model(source, config.model):
        log.info("the model is not that of %s: an export gets files of its own", theirs)
        return
    kept = find_model_file(source / TOKENIZER)
    if kept.is_file() and not (tokenizer.is_file() and kept.read_bytes() == tokenizer.read_bytes()):
        log.info("the tokenizer is not that of %s: an export gets files of its own", theirs)
        return
    partial = ours.with_name(f".{HUGGING_FACE}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # Links stay links: an export refuses them, and copies nothing that they lead to.
    shutil.copytree(theirs, partial, symlinks=True)
    partial.rename(ours)
