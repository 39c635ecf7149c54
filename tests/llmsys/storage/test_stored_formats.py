"""Every stored format has a version; frozen files of this version are read, and those of the one
before are refused.
"""

import contextlib
import hashlib
import json
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import yaml

from llmsys import __version__
from llmsys.ablation.record import load_record
from llmsys.config.batch import BatchConfig
from llmsys.config.deduplication import DeduplicationConfig
from llmsys.config.loading.load import load_run_config
from llmsys.convert.conversion_record import read_conversion_record
from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.dedup.dedup_index import load_earlier_dataset
from llmsys.dataset.loss_parts import read_loss_parts
from llmsys.dataset.token_shards import open_tokens, read_batches, verify_checksums
from llmsys.errors import CheckpointFormatError, FormatError
from llmsys.estimate.device_profile import load_device_profile
from llmsys.events import EventWriter, read_events
from llmsys.launch.main import main
from llmsys.report.run_record import read_run
from llmsys.storage.stored_formats import (
    ABLATION,
    ARROW_KEY,
    CHECKPOINT,
    CHECKPOINT_INDEX,
    CHECKPOINT_METADATA,
    DEDUP_INDEX,
    DEDUP_KEYS,
    DEVICE_PROFILE,
    DOCUMENT_LOSSES,
    DOCUMENTS,
    DROPPED,
    EVENTS,
    EXPORT_RECORD,
    FORMATS,
    IMPORT_RECORD,
    JOURNAL,
    MANIFEST,
    PAGE_TABLE,
    PAIRS,
    RUN_CONFIG,
    RUN_ENVIRONMENT,
    TOKEN_INDEX,
    TOKENIZER_RECORD,
    VERSION_KEY,
    StoredFormat,
)
from llmsys.train.build_objective import build_source_windows
from llmsys.train.checkpoint_average import average_checkpoints
from llmsys.train.checkpoint_load import find_newest_checkpoint, load_tensors
from llmsys.train.checkpoint_record import read_record
from llmsys.train.source_checkpoint import find_source_checkpoint
from tests.helpers.paths import ROOT

ARCHIVES = ROOT / "tests" / "data" / "formats"
# A file of each format in the archives.
SAMPLES: dict[StoredFormat, str] = {
    MANIFEST: "dataset/manifest.json",
    JOURNAL: "dataset/journal/records.sqlite",
    DOCUMENTS: "dataset/documents/part-00000.arrow",
    PAIRS: "pairs/documents/train-00000.arrow",
    DROPPED: "dataset/dropped/part-00000.arrow",
    TOKEN_INDEX: "dataset/tokens/train.index",
    PAGE_TABLE: "dataset/tokens/train-00000.pages",
    DEDUP_INDEX: "dataset/index/index.json",
    DEDUP_KEYS: "dataset/index/minhash-00000-of-00001.arrow",
    TOKENIZER_RECORD: "dataset/tokenizer/made.json",
    RUN_CONFIG: "run/config.yaml",
    RUN_ENVIRONMENT: "run/environment.json",
    EVENTS: "run/events.jsonl",
    DOCUMENT_LOSSES: "run/document_losses/step-00000002-00000002.rank-00000.arrow",
    CHECKPOINT: "run/checkpoints/step-00000001/state.json",
    CHECKPOINT_METADATA: "run/checkpoints/step-00000001/metadata.json",
    CHECKPOINT_INDEX: "run/checkpoints/step-00000002/__0_0.index",
    IMPORT_RECORD: "import/hugging_face/record.json",
    EXPORT_RECORD: "run/llmsys.json",
    DEVICE_PROFILE: "device.yaml",
    ABLATION: "ablation.json",
}


def unpack(version: str, folder: Path) -> Path:
    with tarfile.open(ARCHIVES / f"{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(__version__, tmp_path_factory.mktemp("samples"))


def read_version(path: Path, stored: StoredFormat) -> Any:
    """Return the version in a file, read without the code that writes it."""
    if path.suffix == ".sqlite":
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return connection.execute("pragma user_version").fetchone()[0]
    if path.suffix == ".pages":
        return int(path.read_bytes()[:8].removeprefix(b"LLMPAGE"))
    if path.suffix in (".arrow", ".index"):
        text = pa.ipc.open_file(pa.memory_map(str(path))).schema.metadata[ARROW_KEY].decode()
        assert text.startswith(stored.name)
        return int(text.removeprefix(stored.name))
    text = path.read_text()
    return yaml.safe_load(text.partition("\n")[0] if path.suffix == ".jsonl" else text)[VERSION_KEY]


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
def test_a_file_of_every_format_has_its_version(samples: Path, stored: StoredFormat) -> None:
    """After a version was raised: `python -m tests.helpers.format_samples`."""
    assert read_version(samples / SAMPLES[stored], stored) == stored.version


def test_names_of_formats_differ() -> None:
    assert len({stored.name for stored in FORMATS}) == len(FORMATS) == len(SAMPLES)


def test_frozen_losses_are_read(samples: Path) -> None:
    (rows,) = read_loss_parts(samples / "run", ["abc"])
    assert rows.to_pylist() == [
        {"step": 2, "source": 0, "epoch": 0, "document": 4, "tokens": 3, "nats": 4.5,
            "applied": True},
        {"step": 2, "source": 0, "epoch": 0, "document": 7, "tokens": 5, "nats": 12.25,
            "applied": True},
    ]  # fmt: skip


def test_a_frozen_dataset_is_read_with_the_same_tokens_in_the_same_order(samples: Path) -> None:
    for name in ("dataset", "pairs"):
        verify_checksums(samples / name)
    shards = open_tokens(samples / "dataset", "train")
    rows = build_source_windows(shards, BatchConfig(sequence_length=32), 3).get_rows(range(1_000))
    content = rows.tokens.astype("<i8").tobytes() + rows.documents.astype("<i8").tobytes()
    assert (
        hashlib.sha256(content).hexdigest()
        == "2be497d11944c76209bfe803f2cce78cdd056c543c1b548ed13c6750ec6b73ee"
    )
    targets = open_tokens(samples / "pairs", "train")
    assert (
        sum(len(targets.get_tokens(number)) for number in range(targets.num_documents))
        == targets.num_tokens
    )
    for folder, column in (
        ("dataset/documents", "text"),
        ("dataset/dropped", "reason"),
        ("pairs/documents", "target"),
    ):
        for path in (samples / folder).iterdir():
            assert all(batch.column(column).null_count == 0 for batch in read_batches(path)), path


def test_the_journal_and_the_index_of_a_frozen_dataset_are_read(samples: Path) -> None:
    journal = Journal(samples / "dataset")
    journal.close()
    assert [journal.read_records("tokens", 0, 9)[number].result["name"] for number in range(3)] == [
        "train-00000.arrow",
        "train-00001.arrow",
        "heldout-00000.arrow",
    ]
    config = DeduplicationConfig.model_validate(
        {"url": {"kind": "url"}, "minhash": {"kind": "minhash"}}
    )
    words = {"default": False, "en": False}
    digest = json.loads((samples / "dataset/index/index.json").read_text())["files"]
    found = load_earlier_dataset(
        samples / "dataset", config, words, lambda path: digest.get(path.name, "of the index")
    )
    assert (found.name, found.rows, sorted(found.keys)) == ("tiny", 8, ["exact", "minhash", "url"])


@pytest.mark.parametrize("step", [1, 2])
def test_frozen_checkpoints_of_one_and_of_two_ranks_are_read(samples: Path, step: int) -> None:
    checkpoint = samples / "run" / "checkpoints" / f"step-{step:08d}"
    tensors = {"parameter/w": torch.zeros(64, 64), "first_moment/w": torch.zeros(64)}
    load_tensors(tensors, checkpoint)
    assert tensors["parameter/w"].eq(step).all()
    assert tensors["first_moment/w"].eq(1).all()
    assert read_record(checkpoint)["run"] == {"seed": 1}
    assert find_newest_checkpoint(checkpoint.parent) == checkpoint.parent / "step-00000002"


def test_a_frozen_run_an_import_and_a_profile_are_read(samples: Path) -> None:
    record = read_run(samples / "run")
    assert record.config["run"]["name"] == "drill"
    assert record.environment["packages"]["llmsys"]
    assert [event["loss"] for event in read_events(samples / "run" / "events.jsonl")] == [2.5, 2.25]
    assert load_run_config(str(samples / "run")).run.name == "drill"
    assert read_conversion_record(samples / "import") is not None
    assert load_device_profile(str(samples / "device.yaml")).peak_flops["bf16"] > 0
    assert load_record(samples / "ablation.json").get_scores("base", "pages") == {0: 2.5}


# --- files of the version before ---


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What llmsys 0.1 wrote: a dataset and a run with a checkpoint by one rank and one by two."""
    monkeypatch.chdir(tmp_path)
    unpack("0.1.0", tmp_path)
    # A config that stays in place, in which a run folder is only the place of checkpoints and
    # events.
    (tmp_path / "mine.yaml").write_text(
        "base: train/demo\n"
        "run: {folder: run}\n"
        "data: {folder: dataset, inputs: ['*.warc.gz']}\n"
        "train: {precision: fp32}\n"
    )
    return tmp_path


def list_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def without_locks(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if not name.endswith(".lock")}


DATASET = "has manifest format 1, written by llmsys 0.1; llmsys"
RUN = "has run record format 1, written by llmsys 0.1; llmsys"
EVENT_FILE = "has events format 1, written by llmsys 0.1; llmsys"
STEP = "has checkpoint format 3, written by llmsys 0.1; llmsys"
ANY_STEP = r"step-0000000[12] has checkpoint format [23], written by llmsys 0\.1; llmsys"
COMMANDS = {
    "inspect a dataset": (["inspect", "dataset"], DATASET),
    "report a dataset": (["report", "dataset"], DATASET),
    "take a dataset as base": (["show", "dataset"], DATASET),
    "export tokens": (["convert", "dataset", "out", "--tokens", "megatron"], DATASET),
    "prepare again": (["prepare", "mine.yaml"], DATASET),
    "train on it": (["train", "mine.yaml", "run.folder=new"], DATASET),
    "show a run": (["show", "run"], RUN),
    "report a run": (["report", "run"], RUN),
    "compare runs": (["compare", "run", "other"], RUN),
    "generate from a run": (["generate", "run", "--prompt", "x"], RUN),
    "export a run": (["convert", "run", "out"], STEP),
    "trace a run": (["watch", "run", "--once"], RUN),
    "fit a law to runs": (["scale", "fit", "run"], EVENT_FILE),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_files_of_the_version_before_end_with_one_message_that_names_their_reader(
    earlier: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words, said = COMMANDS[case]
    shutil.copytree("run", "other")
    if case == "prepare again":
        (earlier / "x.warc.gz").touch()
    before = without_locks(list_files(earlier))
    # a rank that ended in a process of its own has printed the message
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    text = capfd.readouterr().err
    assert said in text
    assert ". Read it with llmsys 0.1, or " in text
    assert "Traceback" not in text
    assert len([line for line in text.splitlines() if "llmsys 0.1" in line]) == 1
    assert without_locks(list_files(earlier)) == before


USES: dict[str, Callable[[Path], Any]] = {
    "resume": lambda run: find_newest_checkpoint(run / "checkpoints"),
    "init_from a run": lambda run: find_source_checkpoint(run, "train.init_from", "abc"),
    "branch_from a step": lambda run: find_source_checkpoint(
        Path(f"{run}@2"), "train.branch_from", "abc"
    ),
    "average": lambda run: average_checkpoints(run, 2),
}


@pytest.mark.parametrize("use", USES)
def test_a_checkpoint_of_the_version_before_is_named_and_never_skipped_as_damaged(
    earlier: Path, use: str
) -> None:
    before = list_files(earlier)
    with pytest.raises(CheckpointFormatError, match=ANY_STEP) as refusal:
        USES[use](earlier / "run")
    assert refusal.value.exit_status == 2
    assert list_files(earlier) == before


def test_a_run_does_not_write_into_a_folder_of_the_version_before(earlier: Path) -> None:
    before = (earlier / "run" / "events.jsonl").read_bytes()
    with pytest.raises(FormatError, match=EVENT_FILE):
        EventWriter(earlier / "run" / "events.jsonl")
    assert (earlier / "run" / "events.jsonl").read_bytes() == before


def test_a_config_of_a_persons_own_needs_no_version_and_one_of_a_run_keeps_its(
    samples: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "config.yaml"
    mine.write_text("base: train/demo\n")
    (tmp_path / "hostfile").touch()
    assert load_run_config(str(mine)).run.name == "demo"
    copied = tmp_path / "copied.yaml"
    copied.write_text((samples / "run" / "config.yaml").read_text())
    assert load_run_config(str(copied)).run.name == "drill"
    copied.write_text(copied.read_text().replace("format_version: 2", "format_version: 3"))
    with pytest.raises(
        FormatError, match=r"copied\.yaml has run record format 3, written by a newer llmsys"
    ):
        load_run_config(str(copied))
