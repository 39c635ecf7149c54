"""Saving: in the background as at once, on several ranks, killed or refused in any phase; the
last good one stays.
"""

import contextlib
import math
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.engine.engine import EngineState
from llmsys.errors import CheckpointError
from llmsys.storage.arrow_file import ArrowFileWriter
from llmsys.train import checkpoint_saver, checkpoint_write
from llmsys.train.checkpoint_index import SCHEMA, read_indices
from llmsys.train.checkpoint_load import (
    find_newest_checkpoint,
    load_tensors,
    read_newest_checkpoint,
)
from llmsys.train.checkpoint_plan import select_owned
from llmsys.train.checkpoint_record import RECORD, find_checkpoint_error, read_record
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.checkpoint_storage import CheckpointStorageReader, read_tensors
from tests.helpers.interrupted_saves import PHASES, build_state, die_in, save, save_with_little_room
from tests.helpers.parity_runs import LEARNING_RATE, build_engine, select_rank_batches
from tests.helpers.process import PATIENCE_SECONDS
from tests.helpers.ranks import PRELOADED, run_ranks


@pytest.fixture(scope="module")
def fork() -> Any:
    """Fresh processes that need not import torch again: forked from one that has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.mark.parametrize("phase", PHASES)
def test_a_save_killed_in_any_phase_leaves_a_whole_checkpoint_and_the_next_one_succeeds(
    fork: Any, tmp_path: Path, phase: str
) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    # the same step once more is the only one that replaces
    step = 20 if PHASES[phase] == "replaced" else 30
    process = fork.Process(target=die_in, args=(tmp_path, step, PHASES[phase]))
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL
    after_rename = PHASES[phase] in ("renamed", "removal")
    if PHASES[phase] == "replaced":
        # until the next start looks after it
        assert find_newest_checkpoint(tmp_path) == tmp_path / "step-00000010"
    else:
        assert (
            find_newest_checkpoint(tmp_path)
            == tmp_path / f"step-000000{30 if after_rename else 20}"
        )
    CheckpointSaver(tmp_path, CheckpointConfig())
    assert find_newest_checkpoint(tmp_path) == tmp_path / f"step-000000{30 if after_rename else 20}"
    assert not list(tmp_path.glob(".*"))
    save(tmp_path, 40)
    found = {"parameter/w": torch.empty(64, 64)}
    load_tensors(found, tmp_path / "step-00000040")
    assert (found["parameter/w"] == 40).all()


def test_a_disk_without_room_ends_in_a_message_and_harms_nothing(fork: Any, tmp_path: Path) -> None:
    save(tmp_path, 10)
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=save_with_little_room, args=(tmp_path, 20, sender))
    process.start()
    assert receiver.poll(PATIENCE_SECONDS)
    said = receiver.recv().splitlines()
    process.join(PATIENCE_SECONDS)
    assert len(said) == 2
    for line in said:
        assert line.startswith(f"{tmp_path / 'step-00000020'} could not be saved: ")
        assert "Earlier checkpoints are intact. Free space or lower checkpoint.keep_last" in line
    assert find_newest_checkpoint(tmp_path) == tmp_path / "step-00000010"


def test_one_failed_save_is_told_and_two_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointSaver(tmp_path, CheckpointConfig(mode="async"))

    def raise_full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_write, "write_record", raise_full_disk)
        saver.save_state(build_state(1), 1, {})
        saver.wait_for_save()
    assert [one.failure is None for one in saver.pop_finished_saves()] == [False]
    saver.save_state(build_state(2), 2, {})
    saver.finish_saves()
    assert [(one.steps, one.failure) for one in saver.pop_finished_saves()] == [(2, None)]
    monkeypatch.setattr(checkpoint_write, "write_record", raise_full_disk)
    saver.save_state(build_state(3), 3, {})
    saver.save_state(build_state(4), 4, {})
    with pytest.raises(
        CheckpointError, match="step-00000004 could not be saved: No space left on device"
    ):
        saver.wait_for_save()
    assert find_newest_checkpoint(tmp_path) == tmp_path / "step-00000002"


DAMAGES = {
    "missing": lambda file: file.unlink(),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "flipped": lambda file: file.write_bytes(
        file.read_bytes()[:-50] + b"X" + file.read_bytes()[-49:]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, name: str) -> None:
    save(tmp_path, 10)
    DAMAGES[damage](tmp_path / "step-00000010" / name)
    said = (
        "missing" if damage == "missing" else "damaged (its digest differs from the recorded one)"
    )
    assert find_checkpoint_error(tmp_path / "step-00000010") == f"{name} is {said}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:50], f"{RECORD} cannot be read"),
        (lambda text: "[]", f"{RECORD} cannot be read (not a record of files)"),
        (
            lambda text: text.replace('"steps": 10', '"steps": 18'),
            f"{RECORD} cannot be read (corrupt: its own digest",
        ),
        (lambda text: text.replace('"digest"', '"digests"'), f"{RECORD} cannot be read ('digest')"),
    ],
)
def test_a_damaged_record_is_said(tmp_path: Path, change: Any, said: str) -> None:
    save(tmp_path, 10)
    record = tmp_path / "step-00000010" / RECORD
    record.write_text(change(record.read_text()))
    assert str(find_checkpoint_error(record.parent)).startswith(said)


def test_a_reader_takes_the_next_when_its_checkpoint_is_removed_under_it(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    read: list[Path] = []

    def load(found: Path) -> Path:
        read.append(found)
        if len(read) == 1:  # the run goes on: it saves, and removes what is being read
            save(tmp_path, 30)
            save(tmp_path, 40)
        load_tensors({"parameter/w": torch.empty(64, 64)}, found)
        return found

    assert (
        read_newest_checkpoint(lambda: find_newest_checkpoint(tmp_path), load)
        == tmp_path / "step-00000040"
    )
    assert read[0] == tmp_path / "step-00000020"
    (read[-1] / "__0_0.distcp").unlink()
    with pytest.raises(BaseException, match=r"__0_0\.distcp"):  # damaged, not removed: that is said
        read_newest_checkpoint(lambda: read[-1], load)


def _write_late(*arguments: Any) -> None:
    MAY_WRITE.wait(PATIENCE_SECONDS)
    WRITE_TENSORS(*arguments)


WRITE_TENSORS, MAY_WRITE = checkpoint_write._write_tensors, threading.Event()


def on_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """A save in the background beside one at once, a failure on one rank, and a verification in
    shares.
    """
    engine = build_engine("torch", ParallelLayout(expert=2), 0.5, 1)
    savers = {
        mode: CheckpointSaver(folder / mode, CheckpointConfig.model_validate({"mode": mode}))
        for mode in ("sync", "async")
    }
    for step in range(2):
        engine.train_step(select_rank_batches(step, rank, 2, 1), LEARNING_RATE)
        for mode, saver in savers.items():
            MAY_WRITE.set()
            saver.wait_for_save()
            if mode == "async":
                MAY_WRITE.clear()
            checkpoint_write._write_tensors = _write_late if mode == "async" else WRITE_TENSORS  # type: ignore[assignment]
            saver.save_state(engine.get_state(), step + 1, {})
    alone = savers["async"]._thread is not None and savers["async"]._thread.is_alive()
    # while the second is still being written
    engine.train_step(select_rank_batches(2, rank, 2, 1), LEARNING_RATE)
    MAY_WRITE.set()
    savers["async"].finish_saves()
    failed = _fail_on_rank_one(rank, savers["async"], engine)
    newest = find_newest_checkpoint(folder / "sync")
    damaged = folder / "sync" / "step-00000002" / "__1_0.distcp"  # the one that rank 1 verifies
    if rank == 0:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    torch.distributed.barrier()
    shares = find_checkpoint_error(damaged.parent, rank, 2)
    return {
        "odd": _save_odd_tensors(rank, folder / "odd"),
        "alone": alone,
        "failed": failed,
        "newest": newest,
        "share": shares,
        "then": find_newest_checkpoint(folder / "sync"),
    }


def build_odd_tensors(value: float) -> dict[str, torch.Tensor]:
    """Tensors with one row, with none, without axes, and with rows for every rank."""
    shapes = {
        "rows": (5, 3),
        "columns": (3, 5),
        "one": (1, 4),
        "none": (0, 2),
        "scalar": (),
        "everywhere": (6,),
    }
    return {
        f"parameter/{name}": torch.arange(float(math.prod(shape))).reshape(shape) * value
        for name, shape in shapes.items()
    }


def _save_odd_tensors(rank: int, folder: Path) -> list[str]:
    """Save tensors that are sharded, replicated or plain on two ranks; return what differs in
    another layout.
    """
    mesh = init_device_mesh("cpu", (2,))

    def distribute(
        tensors: dict[str, torch.Tensor], rows: int, everywhere: Any
    ) -> dict[str, torch.Tensor]:
        placements = {
            "rows": Shard(rows),
            "columns": Shard(1 - rows),
            "one": Shard(0),
            "none": Shard(0),
        }
        sharded = {
            f"parameter/{name}": distribute_tensor(tensors[f"parameter/{name}"], mesh, [placement])
            for name, placement in {**placements, "everywhere": everywhere}.items()
        }
        return {**tensors, **sharded}  # the scalar is plain

    tensors = distribute(build_odd_tensors(1.0), 0, Replicate())
    saver = CheckpointSaver(folder, CheckpointConfig())
    for step in (1, 2):  # the second uses the plan of the first
        saver.save_state(EngineState(tensors, step), step, {})
    found = distribute(build_odd_tensors(0.0), 1, Shard(0))
    read_tensors(found, CheckpointStorageReader(folder / "step-00000002"))
    wanted = distribute(build_odd_tensors(1.0), 1, Shard(0))
    return [
        name
        for name, tensor in found.items()
        if not torch.equal(
            *(
                one.full_tensor() if isinstance(one, DTensor) else one
                for one in (tensor, wanted[name])
            )
        )
    ]


def _fail_on_rank_one(rank: int, saver: CheckpointSaver, engine: Any) -> str:
    real = checkpoint_write.compute_digests  # type: ignore[attr-defined]
    if rank == 1:
        checkpoint_write.compute_digests = lambda files: (_ for _ in ()).throw(  # type: ignore[attr-defined]
            OSError(5, "Input/output error", "disk")
        )
    saver.save_state(engine.get_state(), 3, {})
    saver.wait_for_save()
    checkpoint_write.compute_digests = real  # type: ignore[attr-defined]
    [save] = [one for one in saver.pop_finished_saves() if one.failure is not None]
    return str(save.failure)


@pytest.mark.distributed
def test_ranks_save_in_the_background_what_they_would_save_at_once(tmp_path: Path) -> None:
    results = run_ranks(on_two_ranks, 2, tmp_path)
    assert all(result["alone"] for result in results)
    for step in (1, 2):
        folders = [tmp_path / mode / f"step-0000000{step}" for mode in ("sync", "async")]
        if step == 1:  # the second of one mode is damaged by now
            digests = [read_record(folder)["files"] for folder in folders]
            assert set(digests[0]) == {
                f"__{rank}_0.{kind}" for rank in (0, 1) for kind in ("distcp", "index")
            }
            assert digests[0]["__1_0.distcp"] == digests[1]["__1_0.distcp"]
        assert find_checkpoint_error(folders[1]) is None
    for result in results:
        assert "step-00000003 could not be saved: Input/output error" in result["failed"]
        assert result["newest"] == tmp_path / "sync" / "step-00000002"
        assert result["then"] == tmp_path / "sync" / "step-00000001"
    damage = "__1_0.distcp is damaged (its digest differs from the recorded one)"
    assert [result["share"] for result in results] == [None, damage]
    assert not (tmp_path / "async" / "step-00000003").exists()
    assert [result["odd"] for result in results] == [[], []]
    found, odd = build_odd_tensors(0.0), tmp_path / "odd" / "step-00000002"
    load_tensors(found, odd)  # in this one process
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in build_odd_tensors(1.0).items()
    }
    places = CheckpointStorageReader(odd).read_metadata().storage_data
    # no chunk is written twice
    assert len({(index.fqn, index.offset) for index in places}) == len(places) == 8
    half = read_indices(odd, {"parameter/rows": [([0, 0], [2, 3])]})
    assert [(index.fqn, place.relative_path) for index, place in half.storage_data.items()] == [
        ("parameter/rows", "__0_0.distcp")
    ]
    reject_changed_indices(odd)


def reject_changed_indices(checkpoint: Path) -> None:
    """An index that points out of its tensor or file, or leaves a hole, is refused with the
    reason.
    """
    path = checkpoint / "__0_0.index"
    content = path.read_bytes()
    rows = pa.ipc.open_file(pa.py_buffer(content)).read_all().to_pylist()
    row = next(row for row in rows if row["name"] == "parameter/rows")
    for change, text in (
        ({"begin": 1 << 40}, "__0_0.distcp has no such bytes"),
        ({"bytes": 3}, "__0_0.distcp has no such bytes"),
        ({"offset": [-1, 0]}, "a chunk is not within its tensor"),
        ({"offset": [4, 0]}, "a chunk is not within its tensor"),
        ({"size": [1, 3]}, r"parameter/rows: its chunks do not fill \[5, 3\]"),
        ({"shape": [1 << 40, 3]}, "parameter/rows has another shape or type in another index"),
        ({"size": [3]}, "the axes of a chunk differ"),
        ({"dtype": "load"}, "'load' is not a torch dtype"),
    ):
        changed = [one | change if one is row else one for one in rows]
        with ArrowFileWriter(path, SCHEMA) as writer:
            writer.write(pa.RecordBatch.from_pylist(changed, SCHEMA))
        with pytest.raises(CheckpointError, match=f"{text}.*Use another checkpoint"):
            load_tensors(build_odd_tensors(0.0), checkpoint)
    path.write_bytes(b"no index")
    with pytest.raises(
        CheckpointError, match=r"__0_0\.index cannot be read .*Use another checkpoint"
    ):
        load_tensors(build_odd_tensors(0.0), checkpoint)


def test_each_chunk_is_written_by_one_of_its_holders_and_they_share_the_work() -> None:
    """Four ranks; a third of the chunks is on all of them, a third on two, and the rest on one."""
    choose = np.random.default_rng(0)
    every, pairs, alone = (choose.integers(0, 1 << 63, 400, np.uint64) for _ in range(3))
    held = [np.concatenate([every, pairs[rank % 2 :: 2], alone[rank::4]]) for rank in range(4)]
    written = [hashes[select_owned(hashes, held, rank)] for rank, hashes in enumerate(held)]
    assert sorted(np.concatenate(written).tolist()) == sorted(
        [*every.tolist(), *pairs.tolist(), *alone.tolist()]
    )
    assert max(map(len, written)) < 350 < len(held[0])


class FakeDevice:
    """Streams of a device that copies when it is waited for, and the order of what they are
    asked.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pending: list[Callable[[], object]] = []
        self.lock = threading.Lock()

    def build_stream(self, device: torch.device) -> "FakeDevice":
        self.calls.append(f"new stream on {device}")
        return self

    def wait_stream(self, other: str) -> None:
        self.calls.append(f"wait for {other}")

    @contextlib.contextmanager
    def enter(self, stream: object) -> Iterator[None]:
        assert stream is self
        self.calls.append("enter")
        yield
        self.calls.append("leave")

    def record_event(self) -> "FakeDevice":
        self.calls.append("record")
        return self

    def synchronize(self) -> None:
        with self.lock:  # the loop and the thread of the save wait for the same copy
            self.calls.append("synchronize")
            while self.pending:
                self.pending.pop(0)()


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on the third device; copies from it happen when the device is
    waited for.
    """

    fake: FakeDevice
    is_cuda = True
    device = torch.device("cuda", 2)

    def detach(self) -> "DeviceTensor":
        return self

    def record_stream(self, stream: object) -> None:
        assert stream is self.fake
        self.fake.calls.append("keep memory")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            target, source = args
            assert kwargs == {"non_blocking": True}
            cls.fake.pending.append(lambda: target.copy_(source.as_subclass(torch.Tensor)))
            return target
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake, empty = FakeDevice(), torch.empty

    def allocate(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            fake.calls.append("pin")
        return empty(*shape, **options)

    monkeypatch.setattr(DeviceTensor, "fake", fake, raising=False)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "Stream", fake.build_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: fake.calls.append(f"thread uses {device}")
    )
    monkeypatch.setattr(checkpoint_saver, "get_local_device", lambda: DeviceTensor.device)
    return fake


def test_a_copy_runs_on_a_stream_of_its_own_until_the_state_changes(
    tmp_path: Path, fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save from the third device: its first step, and a second save into the same memory."""
    state = build_state(1)
    on_device = torch.full((64, 64), 7.0).as_subclass(DeviceTensor)
    state.tensors["parameter/w"] = on_device
    written: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(
        checkpoint_saver,
        "write_sharded_checkpoint",
        lambda tensors, *_: written.append(dict(tensors)),
    )
    saver = CheckpointSaver(tmp_path, CheckpointConfig(mode="async"))
    saver.allocate_buffers(state)
    start = ["new stream on cuda:2"]
    copy = ["wait for the stream of cuda:2", "enter", "keep memory", "leave"]
    assert [call for call in fake_device.calls if call not in ("pin", "record")] == [
        *start,
        *copy,
        "synchronize",
    ]
    assert fake_device.calls.count("pin") == 1
    fake_device.calls.clear()
    saver.save_state(state, 1, {})
    saver.wait_for_copy()  # as the trainer does before the optimizer changes the parameters
    on_device.as_subclass(torch.Tensor).fill_(8.0)
    saver.wait_for_save()
    assert "thread uses cuda:2" in fake_device.calls
    assert fake_device.calls.index("record") < fake_device.calls.index("synchronize")
    assert "pin" not in fake_device.calls
    assert (written[0]["parameter/w"] == 7).all()
