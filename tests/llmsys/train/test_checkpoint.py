"""Checkpoints: saved under one engine, resumed under another; damage is noticed; publishing is
all or nothing.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.errors import CheckpointError
from llmsys.train import checkpoint_load
from llmsys.train.checkpoint_record import compute_digests, find_checkpoint_error
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.checkpoint_write import build_save_error, publish_checkpoint
from llmsys.train.expert_load import update_expert_balance
from llmsys.train.run_settings import require_same_settings
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    build_engine,
    gather_full_state,
    run_reference,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks

BEFORE, AFTER = 2, 3


def train(rank: int, engine: Any, first: int, stop: int) -> list[float]:
    losses = []
    for step in range(first, stop):
        losses.append(
            engine.train_step(
                select_rank_batches(step, rank, torch.distributed.get_world_size(), 1),
                LEARNING_RATE,
            ).loss
        )
        update_expert_balance(engine.module)
    return losses


def start_and_save(rank: int, kind: str, layout: ParallelLayout, folder: Path) -> list[float]:
    engine = build_engine(kind, layout, 0.5, 1)
    losses = train(rank, engine, 0, BEFORE)
    save_checkpoint(engine, folder, {"note": "from the test"}, keep_last=2)
    return losses


def resume(rank: int, cases: list[tuple[str, ParallelLayout, Path]]) -> list[Any]:
    """Each case resumed in turn: the losses of the later steps, the state at the end, and what
    was saved with it.
    """
    results = []
    for kind, layout, folder in cases:
        engine = build_engine(kind, layout, 0.5, 1)
        newest = checkpoint_load.find_newest_checkpoint(folder)
        assert newest is not None
        run_state = checkpoint_load.load_checkpoint(engine, newest)
        losses = train(rank, engine, BEFORE, BEFORE + AFTER)
        results.append((losses, gather_full_state(engine), run_state, engine.get_state().steps))
    return results if rank == 0 else []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints after BEFORE steps, written by two processes under FSDP2 with split experts
    and under ZeRO-2.
    """
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("torch", "zero2")}
    for kind, folder in folders.items():
        run_ranks(start_and_save, 2, kind, ParallelLayout(expert=2), folder)
    return folders


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_engine_and_layout_resumes_any_checkpoint_on_the_same_trajectory(
    saved: dict[str, Path], world_size: int
) -> None:
    layout = ParallelLayout(expert=min(world_size, 2))
    cases = [("torch", layout, saved["zero2"]), ("torch", ParallelLayout(), saved["torch"])]
    if world_size > 1:
        cases.append(("zero2", layout, saved["torch"]))
    expected_losses, _, expected = run_reference(0.5, BEFORE + AFTER)
    for losses, state, run_state, steps in run_ranks(resume, world_size, cases)[0]:
        torch.testing.assert_close(losses, expected_losses[BEFORE:], rtol=1e-5, atol=1e-6)
        assert run_state == {"note": "from the test"}
        assert steps == BEFORE + AFTER
        for key, value in expected.items():
            allowed = (
                0.02 * LEARNING_RATE
                if key.startswith("parameter/")
                else 2e-4 * float(value.abs().max())
            )
            assert float((torch.from_numpy(state[key]) - value).abs().max()) <= allowed, key


def skip_and_resume(rank: int, folder: Path) -> list[Any]:
    """Steps 0 to 4 of which step 1 is skipped, whole and resumed after step 2: updates so far,
    and the state.
    """
    whole = build_engine("torch", ParallelLayout(), 0.5, 1)
    saver = CheckpointSaver(folder, CheckpointConfig())
    for step in range(3):
        whole.train_step(
            select_rank_batches(step, rank, 1, 1), LEARNING_RATE, lambda *_, step=step: step != 1
        )
    saver.save_state(whole.get_state(), 3, {})
    saver.finish_saves()

    resumed = build_engine("torch", ParallelLayout(), 0.5, 1)
    checkpoint_load.load_checkpoint(resumed, folder / "step-00000003")
    updates = [engine.get_state().steps for engine in (whole, resumed)]
    for engine in (whole, resumed):
        for step in range(3, 5):
            engine.train_step(select_rank_batches(step, rank, 1, 1), LEARNING_RATE)
    return [updates, *(gather_full_state(engine) for engine in (whole, resumed))]


def test_a_run_that_skipped_steps_resumes_with_the_updates_of_its_optimizer(tmp_path: Path) -> None:
    [(updates, whole, resumed)] = run_ranks(skip_and_resume, 1, tmp_path)
    # the corrections of the moments' bias follow these, and the data follow the steps
    assert updates == [2, 2]
    for name, value in whole.items():
        assert (resumed[name] == value).all(), name


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (100, 200):
        partial = tmp_path / ".partial"
        partial.mkdir()
        (partial / "__0_0.distcp").write_bytes(b"weights" * 100)
        files = compute_digests(partial.iterdir())
        publish_checkpoint(
            partial, tmp_path / f"step-{steps:08d}", {"steps": steps, "run": {}, "files": files}
        )
    assert checkpoint_load.find_newest_checkpoint(tmp_path) == tmp_path / "step-00000200"
    damaged = tmp_path / "step-00000200" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"X")
    assert checkpoint_load.find_newest_checkpoint(tmp_path) == tmp_path / "step-00000100"
    assert "__0_0.distcp is damaged" in caplog.text
    damaged.unlink()
    assert find_checkpoint_error(damaged.parent) == "__0_0.distcp is missing"


def test_a_full_disk_is_said_with_what_is_safe() -> None:
    full = OSError(28, "No space left on device")
    said = build_save_error(Path("x/step-00000100"), CheckpointException("write", {1: (full, [])}))  # type: ignore[dict-item]
    assert isinstance(said, CheckpointError)
    assert (
        "x/step-00000100 could not be saved: No space left on device. Earlier checkpoints"
        in str(said)
    )
    bug = CheckpointException("write", {0: (ValueError("a bug"), [])})  # type: ignore[dict-item]
    assert build_save_error(Path("x"), bug) is bug


def test_a_partial_checkpoint_is_never_seen(tmp_path: Path) -> None:
    (tmp_path / ".step-00000100.partial").mkdir()
    assert checkpoint_load.find_newest_checkpoint(tmp_path) is None
    (tmp_path / "step-00000100").mkdir()
    assert "state.json cannot be read" in str(find_checkpoint_error(tmp_path / "step-00000100"))


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    stored: dict[str, Any] = {"parameter/a": torch.empty(2, 3), "parameter/c": torch.empty(1)}
    for value in stored.values():
        value.size = value.shape
    wanted = {"parameter/a": torch.empty(2, 3), "parameter/b": torch.empty(1)}
    with pytest.raises(
        CheckpointError, match=r"parameter/b is missing\. Use the model section of its run"
    ):
        checkpoint_load._check_names(Path("runs/x"), wanted, stored)


def test_the_record_names_every_file(saved: dict[str, Path]) -> None:
    newest = checkpoint_load.list_complete_checkpoints(saved["torch"])[-1]
    record = json.loads((newest / "state.json").read_text())
    assert sorted(record["files"]) == sorted(
        file.name for file in newest.iterdir() if file.name != "state.json"
    )


def test_changed_data_tokenizer_and_model_are_readable_differences() -> None:
    saved = {"data": {"documents": 120, "tokens": 9000}, "data_fingerprint": "5f",
        "tokenizer_fingerprint": "7a",
             "model": {"hidden_size": 32}}  # fmt: skip
    now = {"data": {"documents": 121, "tokens": 9000}, "data_fingerprint": "60",
        "tokenizer_fingerprint": "7a",
           "model": {"hidden_size": 64}}  # fmt: skip
    require_same_settings(Path("x/step-00000100"), saved, saved)
    with pytest.raises(CheckpointError) as caught:
        require_same_settings(Path("x/step-00000100"), saved, now)
    assert str(caught.value).startswith(
        "x/step-00000100 was trained with other settings: data.documents was 120, now 121; "
        "data_fingerprint was 5f, now 60; model.hidden_size was 32, now 64. A run folder belongs "
        "to one trajectory. The data differ"
    )
    assert "The model differs: restore the model section." in str(caught.value)
    assert "tokenizer" not in str(caught.value)
