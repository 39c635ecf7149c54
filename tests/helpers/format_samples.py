"""A file of every stored format, written by the code itself: two datasets, a run, an import and a
device profile.

    python -m tests.helpers.format_samples

writes tests/data/formats/VERSION.tar.gz of this version of llmsys. Do so when the version of a
format is raised, and keep the archives of earlier versions: a reader that takes them over is tested
with them.
"""

import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmsys import __version__
from llmsys.ablation.differences import compute_difference
from llmsys.ablation.record import (
    AblationRecord,
    PreparedSet,
    PreparedVariant,
    Score,
    ScoredRun,
    VariantRecord,
    save_record,
)
from llmsys.config.loading.config_files import format_recorded_config
from llmsys.config.loading.yaml_files import dump_yaml
from llmsys.convert.conversion_record import describe_origin
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.loss_parts import LOSS_SCHEMA, write_loss_part
from llmsys.doctor.toy_dataset import build_toy_config
from llmsys.estimate.device_profile import load_device_profile
from llmsys.events import EventWriter
from llmsys.train.run_folder import write_run_record
from tests.helpers.interrupted_saves import save
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl
from tests.helpers.tiny_pairs import write_pairs_config
from tests.helpers.transformers_models import build

FOLDER = ROOT / "tests" / "data" / "formats"
EVENTS = ({"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25})


def write_samples(folder: Path) -> None:
    """Write `dataset`, `pairs`, `run`, `import` and `device.yaml` into a folder."""
    scratch = folder / "scratch"
    crawl = make_crawl(scratch / "crawl", files=1, pages=8)
    deduplicate = {
        "url": {"kind": "url"},
        "minhash": {"kind": "minhash"},
        "index": {"kind": "kept"},
    }
    config = build_tiny_config(
        folder / "dataset", crawl, deduplicate=deduplicate, documents={"num_shards": 1}
    )
    tokenizer = config.tokenizer.model_copy(update={"vocab_size": 300})
    prepare_dataset(config.model_copy(update={"tokenizer": tokenizer}))
    prepare_dataset(write_pairs_config(scratch / "pairs", pairs=30, heldout=3))
    (scratch / "pairs" / "data").rename(folder / "pairs")
    shutil.rmtree(folder / "dataset" / "work")
    write_run(folder / "run")
    build("llama").save_pretrained(scratch / "theirs")
    convert_from_hugging_face(scratch / "theirs", folder / "import")
    device = load_device_profile("h100-sxm")
    (folder / "device.yaml").write_text(dump_yaml(device.model_dump(mode="json")), encoding="utf-8")
    write_ablation(folder)
    shutil.rmtree(scratch)


def write_run(folder: Path) -> None:
    """Write a run folder: its record, events, a checkpoint by one rank and one by two, and the
    record of an export.
    """
    config = build_toy_config(folder.parent)
    folder.mkdir(parents=True)
    write_run_record(config, "abc", 1)
    _drop_machine(folder / "environment.json")
    with EventWriter(folder / "events.jsonl") as events:
        for fields in EVENTS:
            events.write("step", **fields)
    write_losses(folder)
    save(folder / "checkpoints", 1)
    run_ranks(_save_on_rank, 2, folder / "checkpoints")
    origin = describe_origin("toy", folder / "checkpoints" / "step-00000001")
    (folder / "llmsys.json").write_text(json.dumps(origin))
    assert (folder / "config.yaml").read_text() == format_recorded_config(
        config.model_dump(mode="json")
    )


def write_ablation(folder: Path) -> None:
    """Write the record of an ablation with one run of the base."""
    score = Score(bits_per_byte=2.5, loss=5.0, evaluated_tokens=3, evaluated_bytes=9)
    run = ScoredRun(fingerprints={"": "abc", "pages": "def"}, scores={"pages": score})
    found = compute_difference({0: 2.5, 1: 2.25}, {0: 2.25, 1: 2.5})
    assert found is not None
    record = AblationRecord(
        shared={"tokenizer": {"kind": "sentencepiece"}},
        variants={
            "base": VariantRecord(choices={"rules": []}, changes={}),
            "one": VariantRecord(choices={"rules": [1]}, changes={"rules": [[], [1]]}),
        },
        sets={
            "pages": PreparedSet(documents=1, text_bytes=9, tokens=3, left_out=2, fingerprint="def")
        },
        datasets={
            "base": PreparedVariant(
                documents=4, text_bytes=90, train_tokens=30, passes=0.5, fingerprint="abc"
            )
        },
        runs={"base": {"0": run}},
        differences={"one": {"pages": found}},
    )
    save_record(record, folder)


def write_losses(folder: Path) -> None:
    """Write the losses of two documents in a step."""
    columns: dict[str, list[Any]] = {
        "step": [2, 2],
        "source": [0, 0],
        "epoch": [0, 0],
        "document": [4, 7],
    }
    columns |= {"tokens": [3, 5], "nats": [4.5, 12.25], "applied": [True, True]}
    write_loss_part(folder, 0, pa.record_batch(columns, schema=LOSS_SCHEMA), ["abc"])


def _drop_machine(path: Path) -> None:
    """Replace what names the machine that wrote the sample."""
    values = json.loads(path.read_text())
    values |= {"host": "host", "platform": "Linux", "variables": {}, "affinity": None}
    values["source"] = {"version": __version__, "folder": "llmsys", "branch": None}
    path.write_text(json.dumps(values, indent=2))


def _save_on_rank(rank: int, folder: Path) -> None:
    save(folder, 2)


def pack_samples(archive: Path) -> None:
    """Write the samples into an archive."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "samples"
        folder.mkdir()
        write_samples(folder)
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(folder, ".")


if __name__ == "__main__":
    pack_samples(FOLDER / f"{__version__}.tar.gz")
