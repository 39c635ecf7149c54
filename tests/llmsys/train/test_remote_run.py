"""Laws of a run in object storage: it continues anywhere with the same bits, and a torn upload does not count."""

import json
from pathlib import Path

import pytest

from llmsys.config.load import load_run_config
from llmsys.folder_upload import UploadRecord, upload_files
from llmsys.object_store import open_object_folder
from llmsys.train.build_trainer import train_run
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.remote_runs import train_ranks

STEPS = 12
SETTINGS = {
    "tokenizer": {"vocab_size": VOCABULARY},
    "model": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 48,
    },
    "batch": {"sequence_length": 32, "sequences": 8, "micro_sequences": 2},
    "train": {"tokens": STEPS * 8 * 32, "reproducibility": "bitwise", "threads_per_process": 1},
    "checkpoint": {"every_steps": 4, "keep_last": 2},
}  # fmt: skip


def read_final_hash(state: bytes) -> str:
    return str(json.loads(state)["state_hash"])


@pytest.mark.distributed
def test_a_run_over_remote_tokens_killed_twice_ends_with_the_hash_of_a_calm_local_run(
    tmp_path: Path, object_storage: FakeS3
) -> None:
    config, s3 = tmp_path / "toy.yaml", object_storage
    config.write_text(json.dumps(SETTINGS))
    toy, calm = make_dataset(tmp_path / "toy"), tmp_path / "calm"
    train_run(load_run_config(str(config), [f"data.folder={toy}", f"run.folder={calm}"]), lambda *_: [])
    names = [str(path.relative_to(toy)) for path in toy.rglob("*") if path.is_file()]
    upload_files(toy, open_object_folder("s3://crawl/toy"), names, UploadRecord(toy))
    words = [str(config), "data.folder=s3://crawl/toy", "run.folder=s3://crawl/run"]
    # Killed between the tensors of its second checkpoint, on two processes.
    assert -9 in train_ranks(words, 2, tmp_path / "first", fatal="step-00000008/__1_0.distcp")
    saved = [key for key in s3.objects if key.endswith("state.json")]
    assert saved == ["run/checkpoints/step-00000004/state.json"]
    assert any(key.startswith("run/checkpoints/step-00000008/") for key in s3.objects)
    # Killed between the tensors and their record, on one process of another machine.
    assert train_ranks(words, 1, tmp_path / "second", fatal="step-00000008/state.json") == [-9]
    assert [key for key in s3.objects if key.endswith("state.json")] == saved
    assert train_ranks(words, 2, tmp_path / "second") == [0, 0]
    final = f"checkpoints/step-{STEPS:08d}/state.json"
    assert read_final_hash(s3.objects[f"run/{final}"]) == read_final_hash((calm / final).read_bytes())
    starts = [json.loads(line) for line in s3.objects["run/events.jsonl"].splitlines() if b'"start"' in line]
    # The second attempt was killed before it uploaded its events; the third found its newer checkpoint on the disk.
    assert [(start["world_size"], start["resumed_from"]) for start in starts] == [(2, None), (1, 4), (2, 8)]
    assert sorted({key.split("/")[2] for key in s3.objects if "/step-" in key}) == ["step-00000008", "step-00000012"]
