"""Versions of all files that llmsys stores, and the message about a file of another version.

Invariants:
- A writer puts the version of its format into the file; a reader checks it before it reads anything
  else.
- A version is raised when a reader of the version before would fail or would read something else.
- `tests/data/formats` has a frozen file of each version that is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys import __version__
from llmsys.errors import CheckpointFormatError, DataError, FormatError

# Key of the version in JSON and YAML files.
VERSION_KEY = "format_version"
# Key of name and version in the metadata of an Arrow schema: b"documents 2".
ARROW_KEY = b"llmsys.format"
# Folder of the losses by document in a run folder.
LOSSES_FOLDER = "document_losses"
# The last release that wrote formats below those of this file. It stored no version in most of
# them.
EARLIER_RELEASE = "0.1"


@dataclass(frozen=True)
class StoredFormat:
    """One kind of stored file.

    Attributes:
        name: Name in messages, such as `checkpoint`.
        version: Version that this release writes and reads.
        files: Names of the files, as the documentation shows them.
        place: Where the version is in the file.
        readers: Commands and settings that read it.
        remedy: What to do about a file of another version, as the end of a sentence that begins
            with `or`.
    """

    name: str
    version: int
    files: str
    place: str
    readers: str
    remedy: str

    @property
    def arrow_metadata(self) -> dict[bytes, bytes]:
        """Metadata of an Arrow schema with name and version."""
        return {ARROW_KEY: f"{self.name} {self.version}".encode()}


_PREPARE_AGAIN = (
    "prepare the dataset again in a new folder: llmsys prepare CONFIG data.folder=FOLDER"
)
_TRAIN_AGAIN = "train in a new folder: llmsys train CONFIG run.folder=FOLDER"
_KEY = f"`{VERSION_KEY}`"
_SCHEMA = f"`{ARROW_KEY.decode()}` in the metadata of the schema"
_DATASET_READERS = "`train`, `inspect`, `report`, `convert`"

MANIFEST = StoredFormat(
    "manifest",
    2,
    "manifest.json, and the tokens/*.arrow of pairs and images, which it lists",
    _KEY,
    f"{_DATASET_READERS}, `prepare`, `base: DATASET`",
    _PREPARE_AGAIN,
)
JOURNAL = StoredFormat(
    "journal",
    2,
    "journal/records.sqlite",
    "`pragma user_version`",
    "`prepare`, `tokenizer`",
    _PREPARE_AGAIN,
)
DOCUMENTS = StoredFormat(
    "documents",
    2,
    "documents/*.arrow of a crawl",
    _SCHEMA,
    "`inspect`, `report`, `trace`",
    _PREPARE_AGAIN,
)
PAIRS = StoredFormat(
    "pairs",
    2,
    "documents/*.arrow of pairs and labelled texts",
    _SCHEMA,
    "`inspect`, `report`",
    _PREPARE_AGAIN,
)
DROPPED = StoredFormat(
    "dropped documents", 2, "dropped/*.arrow", _SCHEMA, "`inspect`, `report`", _PREPARE_AGAIN
)
# Token files have no version: the fingerprint of a dataset is a hash of their bytes, which must not
# change with a version.
TOKEN_INDEX = StoredFormat(
    "token index",
    2,
    "tokens/*.index and the tokens/*.arrow that it lists",
    _SCHEMA,
    _DATASET_READERS,
    _PREPARE_AGAIN,
)
PAGE_TABLE = StoredFormat(
    "page table",
    1,
    "tokens/*.pages",
    "the first eight bytes, `LLMPAGE1`",
    _DATASET_READERS,
    _PREPARE_AGAIN,
)
DEDUP_INDEX = StoredFormat(
    "deduplication index",
    3,
    "index/index.json",
    _KEY,
    "`data.deduplicate.earlier_datasets`",
    _PREPARE_AGAIN,
)
DEDUP_KEYS = StoredFormat(
    "deduplication keys",
    3,
    "index/*.arrow",
    _SCHEMA,
    "`data.deduplicate.earlier_datasets`",
    _PREPARE_AGAIN,
)
TOKENIZER_RECORD = StoredFormat(
    "tokenizer record", 2, "tokenizer/made.json", _KEY, "people", _PREPARE_AGAIN
)
RUN_CONFIG = StoredFormat(
    "run record",
    2,
    "config.yaml",
    _KEY,
    "every command that takes a run folder, `base: RUN`",
    _TRAIN_AGAIN,
)
RUN_ENVIRONMENT = StoredFormat(
    "run environment", 2, "environment.json", _KEY, "`report`, `compare`", _TRAIN_AGAIN
)
EVENTS = StoredFormat(
    "events",
    2,
    "events.jsonl",
    "the first line, an event `format`",
    "`report`, `watch`, `compare`, `trace`, `replay`, `reconcile`",
    "write them in a new folder: run.folder=FOLDER or data.folder=FOLDER",
)
DOCUMENT_LOSSES = StoredFormat(
    "document losses",
    1,
    f"{LOSSES_FOLDER}/*.arrow of a run",
    _SCHEMA,
    "`inspect --by-loss`, `trace --worst`, `report`",
    _TRAIN_AGAIN,
)
CHECKPOINT = StoredFormat(
    "checkpoint",
    4,
    "checkpoints/step-…/state.json",
    _KEY,
    "`train`, `evaluate`, `generate`, `translate`, `chat`, `convert`, `train.init_from`, "
    "`train.branch_from`",
    "export its weights with that version (llmsys convert) and import them with this one",
)
CHECKPOINT_METADATA = StoredFormat(
    "checkpoint metadata",
    2,
    "checkpoints/step-…/metadata.json",
    _KEY,
    "as state.json",
    CHECKPOINT.remedy,
)
CHECKPOINT_INDEX = StoredFormat(
    "checkpoint index",
    2,
    "checkpoints/step-…/__RANK_0.index",
    _SCHEMA,
    "as state.json",
    CHECKPOINT.remedy,
)
IMPORT_RECORD = StoredFormat(
    "import record",
    2,
    "hugging_face/record.json",
    _KEY,
    "`convert`",
    "import the model again: llmsys convert",
)
EXPORT_RECORD = StoredFormat(
    "export record", 2, "llmsys.json", _KEY, "people", "export the model again: llmsys convert"
)
DEVICE_PROFILE = StoredFormat(
    "device profile",
    1,
    "a device profile",
    f"{_KEY}, optional",
    "`flops.device`",
    "measure it again: llmsys calibrate",
)

ABLATION = StoredFormat(
    "ablation",
    1,
    "ablation.json",
    _KEY,
    "`ablate`",
    "compare in a new folder: llmsys ablate BASE VARIANT --output FOLDER",
)

FORMATS = (
    MANIFEST,
    JOURNAL,
    DOCUMENTS,
    PAIRS,
    DROPPED,
    TOKEN_INDEX,
    PAGE_TABLE,
    DEDUP_INDEX,
    DEDUP_KEYS,
    TOKENIZER_RECORD,
    RUN_CONFIG,
    RUN_ENVIRONMENT,
    EVENTS,
    DOCUMENT_LOSSES,
    CHECKPOINT,
    CHECKPOINT_METADATA,
    CHECKPOINT_INDEX,
    IMPORT_RECORD,
    EXPORT_RECORD,
    DEVICE_PROFILE,
    ABLATION,
)


def describe_version(stored: StoredFormat, found: object) -> str:
    """Return the end of a sentence about a file of another version.

    Args:
        stored: The format.
        found: The version in the file. None: the file has none, as those of llmsys 0.1.

    Returns:
        `has checkpoint format 3, written by llmsys 0.1; … reads format 4. Read it with …, or …`.
    """
    number = 1 if found is None else found
    head = f"has {stored.name} format {number}"
    own = f"llmsys {__version__} reads format {stored.version}"
    if isinstance(number, int) and number > stored.version:
        return (
            f"{head}, written by a newer llmsys; {own}. Read it with a newer llmsys, or "
            f"{stored.remedy}."
        )
    return (
        f"{head}, written by llmsys {EARLIER_RELEASE}; {own}. Read it with llmsys "
        f"{EARLIER_RELEASE}, or {stored.remedy}."
    )


def build_format_error(stored: StoredFormat, found: object, path: Path | str) -> DataError:
    """Return the error about a file of another version.

    Args:
        stored: The format.
        found: The version in the file; None if it has none.
        path: The file.

    Returns:
        The error, which names the version that reads the file and the next step.
    """
    return FormatError(f"{path} {describe_version(stored, found)}")


def build_checkpoint_format_error(found: object, checkpoint: Path) -> CheckpointFormatError:
    """Return the error about a checkpoint of another version.

    Args:
        found: The version in its record; None if it has none.
        checkpoint: Folder of the checkpoint.

    Returns:
        The error, which names the version that reads the checkpoint and the next step.
    """
    return CheckpointFormatError(f"{checkpoint} {describe_version(CHECKPOINT, found)}")


def require_version(stored: StoredFormat, values: Mapping[str, Any], path: Path | str) -> None:
    """Check the version of a JSON or YAML file.

    Args:
        stored: The format.
        values: The content of the file.
        path: The file, for the message.

    Raises:
        FormatError: It has another version, or none.
    """
    found = values.get(VERSION_KEY)
    if found != stored.version:
        raise build_format_error(stored, found, path)


def require_arrow_version(
    stored: StoredFormat, metadata: Mapping[bytes, bytes] | None, path: Path | str
) -> None:
    """Check the version of an Arrow file.

    Args:
        stored: The format.
        metadata: Metadata of the schema; None where it has none.
        path: The file, for the message.

    Raises:
        FormatError: It has another version, or none.
    """
    text = (metadata or {}).get(ARROW_KEY, b"").decode(errors="replace")
    if text == f"{stored.name} {stored.version}":
        return
    number = text.removeprefix(stored.name).strip()
    raise build_format_error(stored, int(number) if number.isdigit() else None, path)
