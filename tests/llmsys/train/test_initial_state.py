"""Folders with history: damage crowds out no whole checkpoint, no run starts over, read errors
are no damage.
"""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.errors import CheckpointError, UnreadableCheckpointError
from llmsys.events import EventWriter
from llmsys.train import checkpoint_record, checkpoint_retention, checkpoint_write
from llmsys.train.checkpoint_load import (
    find_newest_checkpoint,
    load_tensors,
    read_newest_checkpoint,
)
from llmsys.train.checkpoint_record import find_checkpoint_error, list_checkpoints
from llmsys.train.checkpoint_retention import (
    VerifiedCheckpoints,
    remove_old_checkpoints,
    select_kept_steps,
)
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.initial_state import find_resume_point, resume_from_checkpoint
from llmsys.train.step_guard import StepGuard
from tests.helpers.interrupted_saves import build_state, publish_empty_checkpoint, save
from tests.helpers.ranks import run_ranks

EVERYTHING = CheckpointConfig(keep_last=1, keep_every_steps=10)


def damage(checkpoint: Path) -> None:
    file = max(checkpoint.iterdir(), key=lambda path: (path.stat().st_size, path.name))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def save_all(folder: Path, *steps: int) -> list[Path]:
    for step in steps:
        saver = CheckpointSaver(folder, EVERYTHING)
        saver.save_state(build_state(step), step, {"seed": 1}, evaluation={"loss": step / 100})
        saver.finish_saves()
    return [folder / f"step-{step:08d}" for step in steps]


def list_steps(folder: Path) -> list[int]:
    return list(list_checkpoints(folder))


# --- Retention ---


@pytest.mark.parametrize("damaged", [(40,), (30, 40), (20, 40)])
def test_damaged_newest_checkpoints_do_not_let_whole_ones_go(
    tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    for path in save_all(tmp_path, 10, 20, 30, 40):
        if int(path.name[5:]) in damaged:
            damage(path)
    remove_old_checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    whole = [step for step in (10, 20, 30, 40) if step not in damaged][-2:]
    assert set(whole) <= set(list_steps(tmp_path))
    assert all(step not in list_steps(tmp_path) for step in (10, 20, 30, 40) if step < whole[0])


def test_a_run_that_went_on_from_an_older_one_keeps_what_it_saves(tmp_path: Path) -> None:
    """It saves at steps below the damaged ones, which by number are the newest."""
    for path in save_all(tmp_path, 10, 20, 30)[1:]:
        damage(path)
    saver = CheckpointSaver(tmp_path, CheckpointConfig(keep_last=2))
    saver.mark_verified(10)
    for step in (11, 12, 13):
        saver.save_state(build_state(step), step, {"seed": 1})
        saver.finish_saves()
    assert find_newest_checkpoint(tmp_path) == tmp_path / "step-00000013"
    assert {12, 13} <= set(list_steps(tmp_path))
    assert not {10, 11} & set(list_steps(tmp_path))


def test_a_damaged_best_one_takes_no_place_among_the_best(tmp_path: Path) -> None:
    damage(save_all(tmp_path, 10, 20, 30, 40)[0])
    remove_old_checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    assert list_steps(tmp_path) == [20, 40]


def test_only_what_ranks_is_verified_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, 10, 20, 30)
    read: list[str] = []
    real = checkpoint_record.compute_digest

    def note_digest(file: Path) -> str:
        read.append(file.parent.name)
        return real(file)

    monkeypatch.setattr(checkpoint_record, "compute_digest", note_digest)
    verified, rule = VerifiedCheckpoints(), CheckpointConfig(keep_last=2)
    remove_old_checkpoints(tmp_path, CheckpointConfig(keep_last=3), verified)
    assert not read  # nothing would go
    remove_old_checkpoints(tmp_path, rule, verified)
    assert set(read) == {"step-00000030", "step-00000020"}
    save_all(tmp_path, 40)
    read.clear()
    verified.mark_verified(tmp_path / "step-00000040")
    remove_old_checkpoints(tmp_path, rule, verified)
    assert not read
    damage(tmp_path / "step-00000040")  # later than it was verified
    assert not verified.is_complete(tmp_path / "step-00000040")


def test_fewer_whole_ones_than_are_kept_let_nothing_go() -> None:
    assert select_kept_steps(
        [10, 20, 30], {}, CheckpointConfig(keep_last=2), lambda step: step == 20
    ) == {10, 20, 30}


def test_other_names_are_no_checkpoints_and_steps_are_numbers(tmp_path: Path) -> None:
    save_all(tmp_path, 99_999_990, 100_000_000)
    (tmp_path / "step-copy").mkdir()
    (tmp_path / "step-00000010.old").mkdir()
    remove_old_checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    assert list_steps(tmp_path) == [100_000_000]
    assert find_newest_checkpoint(tmp_path) == tmp_path / "step-100000000"
    assert (tmp_path / "step-copy").exists()


# --- Resume ---


class EngineOfOneWeight:
    """An engine with the methods that resuming calls."""

    module = torch.nn.Module()

    def __init__(self) -> None:
        self.tensors = build_state(0).tensors
        self.module.shapes_elsewhere = {}  # type: ignore[assignment]  # no layers on other ranks

    def get_state(self) -> Any:
        return build_state(0).__class__(dict(self.tensors), 0)

    def load_state(self, state: Any) -> None:
        self.tensors = state.tensors


def write_config(run_folder: Path, *words: str) -> RunConfig:
    return load_run_config("train/demo", [f"run.folder={run_folder}", *words])


def resume_run(run_folder: Path, *words: str) -> int | None:
    one = write_config(run_folder, *words)
    if (newest := find_resume_point(one)) is None:
        return None
    return resume_from_checkpoint(
        EngineOfOneWeight(),  # type: ignore[arg-type]
        newest,
        one,
        {"seed": 1},
        StepGuard(one.train),
    )


def test_when_all_are_damaged_the_run_does_not_start_over(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for path in save_all(folder, 10, 20):
        damage(path)
    with pytest.raises(CheckpointError) as caught:
        resume_run(tmp_path)
    said = str(caught.value)
    assert said.startswith(
        f"{tmp_path} has a history but no checkpoint to resume: no checkpoint is complete "
        "(step-00000020: "
    )
    assert "step-00000010: " in said
    assert "is damaged" in said
    assert (
        "The run was not restarted, and nothing was deleted. Restore a complete checkpoint" in said
    )
    assert "set train.restart=true to start at step 0" in said
    assert list_steps(folder) == [10, 20]


def test_a_restart_is_made_when_told_and_moves_the_damaged_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for path in save_all(folder, 10, 20):
        damage(path)
    assert resume_run(tmp_path, "train.restart=true") is None
    assert sorted(path.name for path in (folder / "before-restart-1").iterdir()) == [
        "step-00000010",
        "step-00000020",
    ]
    assert not list_steps(folder)
    assert resume_run(tmp_path) is None  # the new start is killed before its first save
    save_all(folder, 10)
    assert resume_run(tmp_path, "train.restart=true") == 10  # a requeue with the same words goes on


@pytest.mark.parametrize("left", [".step-00000010.removed", ".step-00000010.replaced"])
def test_leftovers_alone_are_history_too(tmp_path: Path, left: str) -> None:
    [path] = save_all(tmp_path / "checkpoints", 10)
    (path / "state.json").unlink()
    path.rename(path.with_name(left))
    with pytest.raises(CheckpointError, match="has a history but no checkpoint to resume"):
        resume_run(tmp_path)


def test_a_lost_folder_of_checkpoints_is_noticed_by_the_events(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl") as events:
        events.write("start", resumed_from=None)
        events.write("step", step=5)
    # it never saved, and so nothing is lost that could be resumed
    assert resume_run(tmp_path) is None
    with EventWriter(tmp_path / "events.jsonl") as events:
        events.write("checkpoint", step=10)
        events.write("start", resumed_from=10)
    with pytest.raises(
        CheckpointError,
        match=r"its events\.jsonl lists a checkpoint of step 10, but .*checkpoints has",
    ):
        resume_run(tmp_path)
    assert resume_run(tmp_path, "train.restart=true") is None
    with EventWriter(tmp_path / "events.jsonl") as events:
        events.write("start", resumed_from=None)
    assert resume_run(tmp_path) is None


def test_a_new_folder_starts_without_a_word(tmp_path: Path) -> None:
    assert resume_run(tmp_path / "new") is None


def reject_on_both_ranks(rank: int, run_folder: Path) -> str:
    try:
        resume_run(run_folder)
    except BaseException as error:
        return f"{type(error).__name__} {error}"
    return "started"


@pytest.mark.distributed
def test_one_rank_says_it_and_all_end(tmp_path: Path) -> None:
    for path in save_all(tmp_path / "checkpoints", 10):
        damage(path)
    first, second = run_ranks(reject_on_both_ranks, 2, tmp_path)
    assert first.startswith("CheckpointError ")
    assert second == "SystemExit 2"


@pytest.mark.parametrize("new", ["missing", "damaged", "whole"])
def test_what_a_killed_save_put_aside_is_given_back_before_resume_looks(
    tmp_path: Path, new: str
) -> None:
    folder = tmp_path / "checkpoints"
    save_all(folder, 10)
    [path] = save_all(folder, 20)
    replaced = path.with_name(f".{path.name}.replaced")
    path.rename(replaced)
    if new != "missing":
        save(tmp_path / "other", 20)
        (tmp_path / "other" / path.name).rename(path)
    if new == "damaged":
        damage(path)
    assert resume_run(tmp_path) == 20
    CheckpointSaver(folder, CheckpointConfig())
    assert not list(folder.glob(".*"))
    assert find_checkpoint_error(path) is None


# --- Errors of reading ---


TRANSIENT = {
    "EIO": errno.EIO,
    "ESTALE": errno.ESTALE,
    "ETIMEDOUT": errno.ETIMEDOUT,
    "EACCES": errno.EACCES,
}


def raise_read_error(patch: pytest.MonkeyPatch, part: str, number: int) -> None:
    """Let every way to read a path that has `part` in it fail as the system would."""
    import builtins
    import io
    import os

    def raise_on_read(real: Any) -> Any:
        def call_real(path: Any, *arguments: Any, **named: Any) -> Any:
            if part in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments, **named)

        return call_real

    for owner, name in ((io, "open"), (builtins, "open"), (os, "listdir"), (os, "scandir")):
        patch.setattr(owner, name, raise_on_read(getattr(owner, name)))


@pytest.mark.parametrize("name", TRANSIENT)
@pytest.mark.parametrize("file", ["state.json", "__0_0.distcp"])
def test_what_cannot_be_read_now_is_not_taken_for_damage(
    tmp_path: Path, name: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    save_all(folder, 10, 20)
    with monkeypatch.context() as patch:
        raise_read_error(patch, f"step-00000020/{file}", TRANSIENT[name])
        for read in (lambda: resume_run(tmp_path), lambda: find_newest_checkpoint(folder)):
            with pytest.raises(UnreadableCheckpointError) as caught:
                read()
            said = str(caught.value)
            assert said.startswith(f"{folder / 'step-00000020' / file} could not be read: ")
            assert (
                "The checkpoint is not treated as corrupt: nothing was skipped or deleted. Repair "
                "the disk, the mount"
            ) in said
    assert list_steps(folder) == [10, 20]
    assert resume_run(tmp_path) == 20


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path / "checkpoints", 10)
    with monkeypatch.context() as patch:
        raise_read_error(patch, str(tmp_path / "checkpoints"), errno.EACCES)
        with pytest.raises(
            UnreadableCheckpointError, match="checkpoints could not be read: Permission denied"
        ):
            resume_run(tmp_path, "train.restart=true")


def test_an_error_while_tensors_are_read_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = save_all(tmp_path, 10)
    raise_read_error(monkeypatch, "__0_0.distcp", errno.EIO)
    with pytest.raises(
        UnreadableCheckpointError, match=r"__0_0\.distcp could not be read: Input/output error"
    ):
        load_tensors({"parameter/w": torch.empty(64, 64)}, path)


@pytest.mark.parametrize("file", ["state.json", "__0_0.distcp"])
def test_retention_removes_nothing_while_a_checkpoint_cannot_be_read(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(tmp_path, 10, 20, 30)
    raise_read_error(monkeypatch, f"step-00000010/{file}", errno.ESTALE)
    with caplog.at_level(logging.WARNING):
        remove_old_checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    assert "no checkpoint was removed; retrying after the next save" in caplog.text
    assert list_steps(tmp_path) == [10, 20, 30]


def test_what_a_run_removes_under_its_reader_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk says ESTALE of a file that another host has removed."""
    save_all(tmp_path, 10, 20)
    real = checkpoint_record.compute_digest

    def remove_and_raise(file: Path) -> str:
        if file.parent.name == "step-00000020":
            checkpoint_write.remove_checkpoint(file.parent)
            raise OSError(errno.ESTALE, "Stale file handle", str(file))
        return real(file)

    monkeypatch.setattr(checkpoint_record, "compute_digest", remove_and_raise)
    assert (
        read_newest_checkpoint(lambda: find_newest_checkpoint(tmp_path), lambda found: found)
        == tmp_path / "step-00000010"
    )


def test_a_failing_removal_is_told_and_the_save_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_forbidden(checkpoint: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint_retention, "remove_checkpoint", raise_forbidden)
    for step in (10, 20):
        publish_empty_checkpoint(tmp_path, step)
    remove_old_checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    assert list_steps(tmp_path) == [10, 20]


def test_no_rank_asks_for_the_files_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"__{rank}_0.distcp": "" for rank in range(8)}
    asked: list[list[str]] = []
    monkeypatch.setattr(
        checkpoint_record, "is_present", lambda path: not asked[-1].append(path.name)
    )
    monkeypatch.setattr(checkpoint_record, "compute_digest", lambda file, like="": like)
    for share in range(4):
        asked.append([])
        assert checkpoint_record.find_damaged_file(tmp_path, names, share, 4) is None
    assert sorted(name for one in asked for name in one) == sorted(names)
    assert {len(one) for one in asked} == {2}
