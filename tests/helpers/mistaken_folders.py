"""A working directory for mistakes: a run, a finished run, a dataset, folders without either, and
files that are wrong in ways of their own.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llmsys.config.loading.load import load_run_config
from llmsys.dataset.manifest import load_manifest, write_manifest
from llmsys.train.checkpoint_record import compute_digests, write_record
from tests.helpers.example_run import write_dataset, write_run
from tests.helpers.paths import CONFIGS

FILES = {
    "brackets": b"run: {name: a\n",
    "tabs": b"run:\n\tname: a\n",
    "twice": b"run: {name: a}\nrun: {name: b}\n",
    "list": b"- run\n",
    "word": b"run\n",
    "nothing": b"",
    "bytes": b"\xff\xfe\x00\x01",
    "with space/config": b"base: train/demo\n",
    "größe/config": b"base: train/demo\n",
}
# configs that are nearly right, by what is wrong in them
EDITS = {
    "typo": "optimizer: {lerning_rate: 1e-3}",
    "section": "optimiser: {learning_rate: 1e-3}",
    "comma": "optimizer: {learning_rate: '0,001'}",
    "yes": "batch: {sequences: yes}",
    "exponent": "optimizer: {learning_rate: 1e3}",
    "list": "train: {tokens: [1000000]}",
    "tab": "train:\n\ttokens: 5",
    "quote": "run: {name: 'a}",
    "colon": "run:\n  name:a",
    "dup": "train: {tokens: 5}\ntrain: {tokens: 6}",
    "hf": "training_args: {learning_rate: 1e-3, num_train_epochs: 3}",
    "torchtitan": "training: {steps: 1000, seq_len: 2048}",
    "deepspeed": "train_micro_batch_size_per_gpu: 4\nzero_optimization: {stage: 2}",
    "selfbase": "base: yaml/selfbase.yaml",
    "missingbase": "base: nowhere.yaml",
    "python": "run: !!python/object/apply:os.system ['true']",
    "date": "run: {name: 2026-01-01}",
    "anchor": "run: *there",
}
MODELS = {
    "model_type": '{"model_type": "lama", "hidden_size": 8}',
    "broken": '{"model_type": "llama",',
    "nomodel": '{"hidden_size": 8}',
    "huge": '{"model_type": "llama", "num_hidden_layers": 1000000000, "hidden_size": 8}',
}
FINISHED = """\
base: train/demo
run: {folder: finished}
data: {folder: prepared}
train: {precision: fp32}
"""


def build_mistaken_folders(root: Path) -> None:
    """Fill a folder, which must be the working directory."""
    (root / "configs").symlink_to(CONFIGS)
    for name in ("empty", "parquets", "run/checkpoints/step-00000050", "with space", "größe"):
        (root / name).mkdir(parents=True)
    pq.write_table(pa.table({"text": ["one text"]}), root / "parquets/a.parquet")
    (write_run(root / "run") / "config.yaml").write_text("format_version: 2\nrun: {folder: run}\n")
    write_dataset(root / "dataset")
    (root / "table.csv").touch()
    for name, content in FILES.items():
        (root / f"{name}.yaml").write_bytes(content)
    (root / "yaml").mkdir()
    for name, text in EDITS.items():
        (root / "yaml" / f"{name}.yaml").write_text(f"{text}\n")
    for name, text in MODELS.items():
        (root / "yaml" / name).mkdir()
        (root / "yaml" / name / "config.json").write_text(text)
    build_finished_run(root)


def build_finished_run(root: Path) -> None:
    """Write the config, the checkpoint without weights, and the events of a run that is done."""
    write_dataset(root / "prepared")
    (root / "finished.yaml").write_text(FINISHED)
    config = load_run_config("finished.yaml")
    manifest = load_manifest(root / "prepared")
    tokenizer = {"tokenizer": config.tokenizer.model_dump(mode="json")}
    write_manifest(
        root / "prepared", manifest.model_copy(update={"config": manifest.config | tokenizer})
    )
    checkpoint = root / "finished" / "checkpoints" / f"step-{config.num_steps:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"none")
    run = {**config.trajectory_settings, "data_fingerprint": manifest.fingerprint}
    record = {"steps": config.num_steps, "updates": config.num_steps, "run": run}
    write_record(checkpoint, record | {"files": compute_digests([checkpoint / "weights"])})
    step = {"time": 0.0, "step": config.num_steps}
    evaluation = {"loss": 2.0, "perplexity": 7.4, "accuracy": 0.5, "evaluated_targets": 100}
    events = [{**step, "event": "evaluation", **evaluation}, {**step, "event": "finish"}]
    lines = [{"time": 0.0, "event": "format", "format_version": 2}, *events]
    (root / "finished" / "events.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines)
    )
