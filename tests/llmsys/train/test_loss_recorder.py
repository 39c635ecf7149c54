"""Losses by document: the same on every layout, their sum is the loss of the run, and no step is
there twice or missing after kills, rewinds and skipped steps.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.data.step_batches import WindowStepBatches
from llmsys.dataset.loss_parts import (
    list_loss_parts,
    read_loss_parts,
    truncate_loss_parts,
)
from llmsys.dataset.token_shards import open_tokens
from llmsys.engine.engine import StepResult
from llmsys.errors import ConfigError, DataError
from llmsys.events import read_latest_events
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.train.build_objective import build_step_batches
from llmsys.train.build_trainer import train_run
from llmsys.train.loss_recorder import DocumentLossRecorder
from llmsys.train.step_guard import StepGuard
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.recorded_runs import (
    Kill,
    Rows,
    compute_step_means,
    read_rows,
    read_step_losses,
    train_recorded,
)

STEPS = 6
SETTINGS: dict[str, Any] = {
    "tokenizer": {"vocab_size": VOCABULARY},
    "model": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 48,
    },
    "batch": {"sequence_length": 32, "sequences": 8},
    "optimizer": {"learning_rate": 0.003},
    "train": {
        "tokens": STEPS * 8 * 32, "log_every_steps": 1, "precision": "fp32",
        "threads_per_process": 1, "record_document_losses": True,
    },
    "checkpoint": {"every_steps": 2, "keep_last": 2},
}  # fmt: skip

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "micro-batches": (1, ("batch.micro_sequences=2",)),
    "plain": (1, ("engine.data_parallel=plain", "batch.micro_sequences=4")),
    "fsdp": (2, ("engine.data_parallel=fsdp",)),
    "fsdp, micro-batches by cost": (
        2,
        ("engine.data_parallel=fsdp", "batch.micro_sequences=2", "batch.assignment=balanced"),
    ),
    "ddp": (2, ("engine.data_parallel=ddp", "layout.shard=1", "layout.replicate=2")),
    "tensor": (2, ("layout.tensor=2", "batch.micro_sequences=4")),
    "context": (2, ("layout.context=2",)),
    "ring": (2, ("layout.context=2", "layout.context_kind=ring")),
    "pipeline": (2, ("layout.pipeline=2", "batch.micro_sequences=2")),
    "deepspeed": (2, ("engine.kind=deepspeed",)),
    "accelerate": (2, ("engine.kind=accelerate",)),
    "bitwise": (2, ("train.reproducibility=bitwise", "batch.micro_sequences=2")),
    "recomputed": (1, ("train.activation_checkpoint=full",)),
    "noise scale": (1, ("train.noise_scale_every_steps=2", "batch.micro_sequences=2")),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "toy")


def write_config(folder: Path, dataset: Path, name: str = "run", **changes: Any) -> Path:
    merged = {
        key: SETTINGS.get(key, {}) | changes.get(key, {}) for key in SETTINGS.keys() | changes
    }
    merged |= {"run": {"folder": str(folder / name)}, "data": {"folder": str(dataset)}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged))
    return path


@pytest.fixture(scope="module")
def plain(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The record of a run in one process and one micro-batch."""
    path = write_config(tmp_path_factory.mktemp("plain"), dataset)
    assert train_recorded(path, 1) == [0]
    return read_rows(path)


def compute_first_losses(config: RunConfig) -> Rows:
    """Compute the losses of the first step from its tokens, by torch alone: documents end at the
    end-of-sequence id.
    """
    model = Transformer(config.model)
    initialize_parameters(model, config.run.seed)
    shards = open_tokens(config.data.folder, "train")
    starts = np.concatenate([[0], np.cumsum(shards.lengths)])
    stream = np.concatenate([shards.get_tokens(n) for n in range(shards.num_documents)])
    steps = build_step_batches(config, 1, 0)
    assert isinstance(steps, WindowStepBatches)
    rows: Rows = {}
    for batch in steps.get_micro_batches(0):
        logits_BTV = model(**batch.to_model_inputs())
        losses_BT = F.cross_entropy(logits_BTV.mT, batch.targets_BT, reduction="none")
        for tokens, targets, losses in zip(
            batch.tokens_BT.tolist(), batch.targets_BT.tolist(), losses_BT.tolist(), strict=True
        ):
            # The row is found in the stream by its tokens.
            row = np.array([tokens[0], *targets])
            twice = np.concatenate([stream, stream[: len(row)]])
            windows = np.lib.stride_tricks.sliding_window_view(twice, len(row))
            (begin,) = np.flatnonzero((windows == row).all(1))
            for place, loss in enumerate(losses, int(begin) + 1):
                document = int(np.searchsorted(starts, place % len(stream), side="right")) - 1
                before = rows.get((1, 0, 0, document), (0, 0.0))
                rows[1, 0, 0, document] = before[0] + 1, before[1] + loss
    return rows


def check_rows(found: Rows, expected: Rows, tolerance: float) -> None:
    """Check that two records have the same documents, targets and losses."""
    assert found.keys() == expected.keys()
    for key, (tokens, nats) in expected.items():
        assert found[key][0] == tokens, key
        assert found[key][1] == pytest.approx(nats, rel=tolerance), key


def check_means(rows: Rows, losses: dict[int, float], tolerance: float = 1e-6) -> None:
    """Check that documents sum to the logged loss of each step."""
    means = compute_step_means(rows)
    assert means.keys() == losses.keys()
    for step, loss in losses.items():
        assert means[step] == pytest.approx(loss, rel=tolerance), step


def test_documents_have_the_losses_of_torchs_cross_entropy(dataset: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, dataset)
    assert train_recorded(path, 1) == [0]
    rows = read_rows(path)
    first = {key: value for key, value in rows.items() if key[0] == 1}
    with torch.no_grad():
        expected = compute_first_losses(load_run_config(str(path)))
    check_rows(first, expected, 1e-5)
    check_means(rows, read_step_losses(path))
    shards = open_tokens(dataset, "train")
    in_epoch = sum(tokens for (_, _, epoch, _), (tokens, _) in rows.items() if epoch == 0)
    assert in_epoch == min(STEPS * 8 * 32, shards.num_tokens // 32 * 32)


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_have_the_same_losses_on_every_layout(
    dataset: Path, plain: Rows, tmp_path: Path, name: str
) -> None:
    ranks, words = LAYOUTS[name]
    path = write_config(tmp_path, dataset)
    assert train_recorded(path, ranks, *words) == [0] * ranks
    rows = read_rows(path)
    check_means(rows, read_step_losses(path))
    check_rows(rows, plain, 1e-4)
    first = {key: value for key, value in plain.items() if key[0] == 1}
    check_rows({key: value for key, value in rows.items() if key[0] == 1}, first, 2e-6)


def test_recording_changes_no_bit_of_a_run(dataset: Path, tmp_path: Path) -> None:
    hashes = []
    for recorded in (True, False):
        path = write_config(tmp_path, dataset, f"recorded-{recorded}")
        words = (
            f"train.record_document_losses={str(recorded).lower()}",
            "train.reproducibility=bitwise",
            "batch.micro_sequences=2",
        )
        assert train_recorded(path, 1, *words) == [0]
        folder = tmp_path / f"recorded-{recorded}"
        events = read_latest_events(folder / "events.jsonl")
        hashes.append([one["state_hash"] for one in events if one["event"] == "state_hash"])
        assert bool(list_loss_parts(folder)) == recorded
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 3


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kill",
    [Kill(1, 3, "after"), Kill(0, 4, "before"), Kill(0, 1, "after"), Kill(1, 5, "before")],
    ids=str,
)
def test_a_killed_run_has_every_step_once(dataset: Path, tmp_path: Path, kill: Kill) -> None:
    bitwise = ("train.reproducibility=bitwise", "batch.micro_sequences=2")
    calm = write_config(tmp_path, dataset, "calm")
    assert train_recorded(calm, 1, *bitwise) == [0]
    path = write_config(tmp_path, dataset)
    # A file for each step, so that some are written after the checkpoint that a run resumes from.
    assert -9 in train_recorded(path, 2, *bitwise, kill=kill, max_rows=1)
    assert train_recorded(path, 1, *bitwise) == [0]
    rows = read_rows(path)
    check_rows(rows, read_rows(calm), 1e-6)
    check_means(rows, read_step_losses(path))
    # The process that resumed has added every step to one file.
    assert max(part.last for part in list_loss_parts(tmp_path / "run") if part.rank == 0) == 6


def train_with_bad_step(path: Path, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process, with a step that the guard refuses once."""
    accept = StepGuard.accept_step
    calls = 0

    def accept_step(self: StepGuard, loss: float, gradient_norm: float) -> bool:
        nonlocal calls
        calls += 1
        if calls != bad:
            return accept(self, loss, gradient_norm)
        self.problem = "a test"
        return False

    monkeypatch.setattr(StepGuard, "accept_step", accept_step)
    train_run(load_run_config(str(path)), lambda *_: [])


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_skipped_steps_are_marked_and_a_rewind_forgets_what_it_repeats(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr("llmsys.train.loss_recorder.MAX_ROWS", 1)
    path = write_config(tmp_path, dataset, train={"on_bad_step": policy})
    train_with_bad_step(path, 4, monkeypatch)
    applied = read_rows(path, applied=True)
    skipped = read_rows(path, applied=False)
    assert {key[0] for key in applied} == {1, 2, 3, 5, 6}
    # A rewind to step 2 trains step 3 again and leaves out step 4.
    assert {key[0] for key in skipped} == ({4} if policy == "skip" else set())
    losses = read_step_losses(path)
    check_means(applied, {step: losses[step] for step in (1, 2, 3, 5, 6)})
    parts = list_loss_parts(tmp_path / "run")
    assert len({part.first for part in parts}) == len(parts)


def test_a_run_that_no_longer_records_keeps_no_later_step(dataset: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, dataset)
    assert -9 in train_recorded(path, 1, kill=Kill(0, 4, "after"), max_rows=1)
    assert max(part.last for part in list_loss_parts(tmp_path / "run")) == 4
    assert train_recorded(path, 1, "train.record_document_losses=false") == [0]
    assert {part.last for part in list_loss_parts(tmp_path / "run")} == {1, 2}


class StubBatches:
    """Micro-batches of a recorder that is driven by hand."""

    def __init__(self, config: RunConfig) -> None:
        self._steps = build_step_batches(config, 1, 0)

    def train(self, recorder: DocumentLossRecorder, step: int) -> None:
        """Give every target of a step the loss 1."""
        batches = self._steps.get_micro_batches(step)
        recorder.begin_step(step, batches)
        for batch in batches:
            _add_ones(batch)
        recorder.end_step(StepResult(1.0, 1.0, 256))


def _add_ones(batch: Batch) -> None:
    assert batch.target_documents is not None
    named = batch.target_documents
    ones = torch.ones(batch.targets_BT.numel())
    named.sums.add_losses(ones, ones.bool(), named.spans_BT.flatten())


def test_each_rank_removes_the_files_of_others_that_are_gone(dataset: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, dataset)
    stub = StubBatches(load_run_config(str(path)))
    folder = tmp_path / "run"
    for rank in range(4):
        recorder = DocumentLossRecorder(folder, rank, 4, ["print"])
        for step in range(4):
            stub.train(recorder, step)
            if step % 2:
                recorder.flush()
        (folder / "document_losses" / f".step-1-4.rank-{rank:05d}.arrow.77.tmp").touch()
    truncate_loss_parts(folder, 2, 1, 3)
    left = [(part.rank, part.last) for part in list_loss_parts(folder)]
    assert sorted(left) == [(0, 4), (1, 2), (2, 4), (3, 4)]
    truncate_loss_parts(folder, 2, 0, 3)
    truncate_loss_parts(folder, 2, 2, 3)
    assert [(part.rank, part.last) for part in list_loss_parts(folder)] == [
        (rank, 2) for rank in range(4)
    ]
    assert not list((folder / "document_losses").glob(".*"))
    truncate_loss_parts(folder, 1, 0, 1)
    steps = {one for rows in read_loss_parts(folder, ["print"]) for one in rows["step"].to_pylist()}
    assert steps == {1}
    assert {part.last for part in list_loss_parts(folder)} == {1}


def test_checkpoints_add_rows_to_a_file_and_no_files(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubBatches(load_run_config(str(write_config(tmp_path, dataset))))
    folder = tmp_path / "run"
    recorder = DocumentLossRecorder(folder, 0, 1, ["print"])
    rows = []
    for step in range(6):
        stub.train(recorder, step)
        recorder.flush()
        rows.append(sum(part.num_rows for part in read_loss_parts(folder, ["print"])))
    assert [(part.first, part.last) for part in list_loss_parts(folder)] == [(1, 6)]
    assert len(list((folder / "document_losses").iterdir())) == 1
    # A file that would be longer than the limit is left, and another one begun.
    monkeypatch.setattr("llmsys.train.loss_recorder.MAX_ROWS", rows[-1])
    stub.train(recorder, 6)
    recorder.flush()
    assert [(part.first, part.last) for part in list_loss_parts(folder)] == [(1, 6), (7, 7)]
    read = [one for rows in read_loss_parts(folder, ["print"]) for one in rows["step"].to_pylist()]
    assert read == sorted(read)
    assert rows == [read.index(step + 1) for step in range(1, 7)]


def test_a_kill_before_the_shorter_file_is_removed_counts_no_row_twice(
    dataset: Path, tmp_path: Path
) -> None:
    stub = StubBatches(load_run_config(str(write_config(tmp_path, dataset))))
    folder = tmp_path / "run"
    recorder = DocumentLossRecorder(folder, 0, 1, ["print"])
    stub.train(recorder, 0)
    stub.train(recorder, 1)
    recorder.flush()
    [short] = list_loss_parts(folder)
    content = short.path.read_bytes()
    stub.train(recorder, 2)
    recorder.flush()
    short.path.write_bytes(content)

    def read_steps() -> list[int]:
        parts = read_loss_parts(folder, ["print"])
        return [one for rows in parts for one in rows["step"].unique().to_pylist()]

    assert read_steps() == [1, 2, 3]
    truncate_loss_parts(folder, 2, 0, 1)
    assert [part.path for part in list_loss_parts(folder)] == [short.path]
    assert read_steps() == [1, 2]
    assert len(list((folder / "document_losses").iterdir())) == 1


def test_a_recorder_forgets_what_comes_after_a_checkpoint(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsys.train.loss_recorder.MAX_ROWS", 1)
    path = write_config(tmp_path, dataset)
    stub = StubBatches(load_run_config(str(path)))
    recorder = DocumentLossRecorder(tmp_path / "run", 0, 1, ["print"])
    for step in range(5):
        stub.train(recorder, step)
    # Step 4 is on disk, step 5 on its way.
    assert [part.last for part in list_loss_parts(tmp_path / "run")] == [1, 2, 3, 4]
    recorder.rewind(2)
    assert [part.last for part in list_loss_parts(tmp_path / "run")] == [1, 2]
    stub.train(recorder, 3)
    recorder.flush()
    steps = [
        step
        for rows in read_loss_parts(tmp_path / "run", ["print"])
        for step in rows.column("step").unique().to_pylist()
    ]
    assert steps == [1, 2, 4]


def test_a_record_that_cannot_be_right_is_refused(dataset: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, dataset)
    stub = StubBatches(load_run_config(str(path)))
    folder = tmp_path / "run"
    with pytest.raises(DataError, match=r"has no losses by document\. Train with train\.record"):
        list(read_loss_parts(folder, ["print"]))
    recorder = DocumentLossRecorder(folder, 0, 1, ["print"])
    stub.train(recorder, 0)
    stub.train(recorder, 1)
    recorder.flush()
    with pytest.raises(DataError, match="recorded with the dataset print, and that of the run is"):
        list(read_loss_parts(folder, ["other"]))
    (part,) = list_loss_parts(folder)
    content = part.path.read_bytes()
    part.path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"rank-00000\.arrow is damaged"):
        list(read_loss_parts(folder, ["print"]))
    part.path.write_bytes(content)
    (part.path.parent / "step-00000002-00000002.rank-00000.arrow").write_bytes(content)
    with pytest.raises(DataError, match="both have step 2 of rank 0, which would count twice"):
        list(read_loss_parts(folder, ["print"]))


def test_an_objective_with_other_targets_is_refused(tmp_path: Path, dataset: Path) -> None:
    path = write_config(tmp_path, dataset, model={"family": "encoder", "head": {"kind": "mlm"}})
    with pytest.raises(
        ConfigError,
        match=r"true records the loss of next tokens by document, and objective\.kind=masked has "
        r"other targets\. Use false, or",
    ):
        load_run_config(str(path))
