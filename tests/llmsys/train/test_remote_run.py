"""Laws of a run in object storage: it continues anywhere with the same bits, and a torn upload
does not count.
"""

import json
from pathlib import Path

import pytest
import torch

from llmsys.config.loading.load import load_run_config
from llmsys.launch.main import main
from llmsys.parallel.control_group import ControlGroup
from llmsys.parallel.process_group import init_process_group
from llmsys.storage.folder_upload import UploadRecord, upload_files
from llmsys.storage.object_store import open_object_folder
from llmsys.train.build_trainer import train_run
from llmsys.train.checkpoint_record import list_checkpoints
from llmsys.train.checkpoint_write import remove_checkpoint, write_sharded_checkpoint
from llmsys.train.remote_run import RemoteRun, find_remote_run
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.example_run import write_run
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.moto_s3 import MotoS3
from tests.helpers.remote_runs import train_ranks

STEPS = 6
SETTINGS = {
    "tokenizer": {"vocab_size": VOCABULARY},
    "model": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 48,
    },
    "batch": {"sequence_length": 32, "sequences": 8, "micro_sequences": 2},
    "train": {"tokens": STEPS * 8 * 32, "reproducibility": "bitwise", "threads_per_process": 1},
    "checkpoint": {"every_steps": 2, "keep_last": 2},
}  # fmt: skip


def write_checkpoint(folder: Path, step: int, content: str) -> None:
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_text(content)
    (path / "state.json").write_text(f"record of {content}")


def read_steps(folder: Path) -> dict[int, str]:
    return {
        step: (path / "__0_0.distcp").read_text()
        for step, path in list_checkpoints(folder / "checkpoints").items()
    }


def open_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteRun:
    """The run of one machine."""
    monkeypatch.setenv("LLMSYS_CACHE", str(cache))
    run = find_remote_run(cache / "s3" / "crawl" / "run")
    assert run is not None
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


def test_the_storage_decides_what_a_machine_continues_from(
    tmp_path: Path, object_storage: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, first = object_storage, open_run(tmp_path / "first", monkeypatch)
    for step in (4, 8, 12):
        write_checkpoint(first.folder, step, f"first {step}")
    (first.folder / "events.jsonl").write_text("first\n")
    for name in (
        "heartbeats/0",
        "launch/run.sh",
        "checkpoints/.step-00000016.partial/__0_0.distcp",
    ):
        (first.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (first.folder / name).write_text("its own")
    first.upload()
    assert not any("its own" in content.decode() for content in s3.objects.values())
    records = [key.endswith("state.json") for key in s3.written]
    assert records == sorted(records), "records are last"
    # Another machine copies what is complete, goes on from step 8, and saves another step 12.
    del s3.objects["run/checkpoints/step-00000012/state.json"]
    second = open_run(tmp_path / "second", monkeypatch)
    second.fetch()
    assert read_steps(second.folder) == {4: "first 4", 8: "first 8"}
    write_checkpoint(second.folder, 12, "second 12")
    write_checkpoint(second.folder, 16, "second 16")
    (second.folder / "events.jsonl").write_text("first\nsecond\n")
    remove_checkpoint(second.folder / "checkpoints" / "step-00000004")
    s3.written.clear()
    second.upload()
    assert [key for key in s3.written if key.startswith("-")] == [
        "-run/checkpoints/step-00000004/state.json", "-run/checkpoints/step-00000004/__0_0.distcp"
    ]  # fmt: skip
    # Back on the first machine: what it saved alone is gone, and what nobody has yet is kept.
    write_checkpoint(first.folder, 20, "first 20")
    first.fetch()
    assert read_steps(first.folder) == {
        8: "first 8",
        12: "second 12",
        16: "second 16",
        20: "first 20",
    }
    assert (first.folder / "events.jsonl").read_text() == "first\nsecond\n"
    s3.written.clear()
    first.upload()
    assert s3.written == [
        "run/checkpoints/step-00000020/__0_0.distcp",
        "run/checkpoints/step-00000020/state.json",
    ]


def test_a_step_that_is_saved_again_counts_no_longer_while_its_files_are_replaced(
    tmp_path: Path, object_storage: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path / "cache", monkeypatch)
    write_checkpoint(run.folder, 4, "old")
    run.upload()
    object_storage.written.clear()
    target = run.folder / "checkpoints" / "step-00000004"
    with init_process_group():
        write_sharded_checkpoint(
            {"a": torch.ones(3)}, target, {"steps": 4, "run": {}}, ControlGroup()
        )
    run.upload()
    name = "run/checkpoints/step-00000004"
    assert object_storage.written == [
        f"-{name}/state.json", f"{name}/__0_0.distcp", f"{name}/metadata.json", f"{name}/state.json"
    ]  # fmt: skip
    assert json.loads(object_storage.objects[f"{name}/state.json"])["steps"] == 4


def test_verbs_take_the_url_of_a_run_and_leave_its_checkpoints_there(
    tmp_path: Path,
    object_storage: FakeS3,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = open_run(tmp_path / "writer", monkeypatch)
    write_run(run.folder)
    (run.folder / "config.yaml").write_text(
        "format_version: 2\nrun: {name: toy, folder: s3://crawl/run}\n"
    )
    write_checkpoint(run.folder, 4, "weights")
    run.upload()
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path / "reader"))
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "reader" / "s3" / "crawl" / "run"
    assert main(["show", "s3://crawl/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["run"]["folder"] == "s3://crawl/run"
    assert main(["watch", "s3://crawl/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "toy"
    assert (copy / "events.jsonl").is_file()
    assert not (copy / "checkpoints").exists()

    object_storage.objects["pages/a.txt"] = b"a page"
    for words, told in [
        (["show", "s3://crawl/pages"], "s3://crawl/pages is not the folder of a run or of a "),
        (["show", "s3://crawl/run/config.yaml"], "is a URL, but a local path is needed"),
        (["watch", "gs://crawl/run"], "is a URL, but a local path is needed"),
        (["inspect", "s3://crawl/run", "data.folder=s3://crawl/data"], "aws s3 sync s3://crawl/da"),
    ]:
        assert main(words) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "reader" / "s3" / "crawl" / "pages").exists()


def read_final_hash(state: bytes) -> str:
    return str(json.loads(state)["state_hash"])


@pytest.mark.distributed
def test_a_run_over_remote_tokens_killed_twice_ends_with_the_hash_of_a_calm_local_run(
    tmp_path: Path,
    moto_storage: MotoS3,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, s3 = tmp_path / "toy.yaml", moto_storage
    config.write_text(json.dumps(SETTINGS))
    toy, calm = make_dataset(tmp_path / "toy"), tmp_path / "calm"
    train_run(
        load_run_config(str(config), [f"data.folder={toy}", f"run.folder={calm}"]), lambda *_: []
    )
    names = [str(path.relative_to(toy)) for path in toy.rglob("*") if path.is_file()]
    upload_files(toy, open_object_folder("s3://crawl/toy"), names, UploadRecord(toy))
    words = [str(config), "data.folder=s3://crawl/toy", "run.folder=s3://crawl/run"]
    # Killed between the tensors of its second checkpoint, on two processes.
    assert -9 in train_ranks(words, 2, tmp_path / "first", fatal="step-00000004/__1_0.index")
    saved = [key for key in s3.objects if key.endswith("state.json")]
    assert saved == ["run/checkpoints/step-00000002/state.json"]
    assert "run/checkpoints/step-00000004/__1_0.distcp" in s3.objects
    # Killed between the tensors and their record, on one process of another machine.
    assert train_ranks(words, 1, tmp_path / "second", fatal="step-00000004/state.json") == [-9]
    assert [key for key in s3.objects if key.endswith("state.json")] == saved
    assert train_ranks(words, 2, tmp_path / "second") == [0, 0]
    final = f"checkpoints/step-{STEPS:08d}/state.json"
    assert read_final_hash(s3.objects[f"run/{final}"]) == read_final_hash(
        (calm / final).read_bytes()
    )
    starts = [
        json.loads(line)
        for line in s3.objects["run/events.jsonl"].splitlines()
        if b'"start"' in line
    ]
    # The second attempt was killed before it uploaded its events; the third found its newer
    # checkpoint on the disk.
    assert [(start["world_size"], start["resumed_from"]) for start in starts] == [
        (2, None),
        (1, 2),
        (2, 4),
    ]
    assert sorted({key.split("/")[2] for key in s3.objects if "/step-" in key}) == [
        "step-00000004",
        "step-00000006",
    ]

    # A third machine knows the URL alone.
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path / "third"))
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(calm), "from-calm"]) == 0
    assert main(["convert", "s3://crawl/run", "from-storage"]) == 0
    exported = [(tmp_path / name / "model.safetensors") for name in ("from-calm", "from-storage")]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    assert main(["evaluate", "s3://crawl/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])
