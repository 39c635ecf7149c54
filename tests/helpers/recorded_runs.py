"""Runs that record losses by document, on any number of ranks, one of which may be killed at a
write.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from llmsys.config.loading.load import load_run_config
from llmsys.dataset.document_losses import open_loss_sources
from llmsys.dataset.loss_parts import read_loss_parts
from llmsys.events import read_latest_events
from llmsys.parallel.port import find_free_port
from tests.helpers.ranks import PRELOADED

# (step, source, epoch, document) → (targets, loss in nats)
Rows = dict[tuple[int, int, int, int], tuple[int, float]]


class Kill(NamedTuple):
    """The end of a run: a rank is killed at its `write`-th file of losses, before or after it."""

    rank: int
    write: int
    when: Literal["before", "after"]


def train_recorded(
    config: Path,
    world_size: int,
    *words: str,
    kill: Kill | None = None,
    max_rows: int | None = None,
) -> list[int]:
    """Train with processes; return their exit codes, all of them -9 if one was killed.

    Args:
        config: The config.
        world_size: Number of processes.
        words: Overrides.
        kill: Rank and write that end the run.
        max_rows: Rows of a file, to write between checkpoints too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    processes = [
        context.Process(
            target=_train_rank, args=(rank, environment, [str(config), *words], kill, max_rows)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    waiting = list(processes)
    while waiting:
        multiprocessing.connection.wait([process.sentinel for process in waiting])
        waiting = [process for process in waiting if process.exitcode is None]
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    for process in processes:
        process.join()
    return [process.exitcode or 0 for process in processes]


def _train_rank(
    rank: int,
    environment: dict[str, str],
    words: Sequence[str],
    kill: Kill | None,
    max_rows: int | None,
) -> None:
    os.environ.clear()
    os.environ |= environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    from llmsys.dataset import loss_parts
    from llmsys.train import loss_recorder
    from llmsys.train.build_trainer import train_run

    write = loss_parts.write_loss_part
    writes = 0

    def write_or_die(*arguments: Any) -> loss_parts.LossPart:
        nonlocal writes
        writes += 1
        dies = kill is not None and (rank, writes) == (kill.rank, kill.write)
        if dies and kill is not None and kill.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        part = write(*arguments)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return part

    vars(loss_parts)["write_loss_part"] = write_or_die
    if max_rows is not None:
        loss_recorder.MAX_ROWS = max_rows
    train_run(load_run_config(words[0], list(words[1:])), lambda *_: [])


def read_rows(config: Path, *words: str, applied: bool | None = None) -> Rows:
    """Read the record of a run, summed over its files.

    Args:
        config: The config.
        words: Overrides.
        applied: Only the steps that were applied, or skipped.
    """
    run = load_run_config(str(config), list(words))
    prints = [source.fingerprint for source in open_loss_sources(run.data)[1]]
    table = pa.Table.from_batches(list(read_loss_parts(run.run.folder, prints)))
    rows: Rows = {}
    for row in table.to_pylist():
        if applied in (None, row["applied"]):
            key = row["step"], row["source"], row["epoch"], row["document"]
            tokens, nats = rows.get(key, (0, 0.0))
            rows[key] = tokens + row["tokens"], nats + row["nats"]
    return rows


def read_step_losses(config: Path, *words: str) -> dict[int, float]:
    """Read the loss of each logged step, of the last attempt at it."""
    run = load_run_config(str(config), list(words))
    with contextlib.suppress(FileNotFoundError):
        events = read_latest_events(run.run.folder / "events.jsonl")
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return {}


def compute_step_means(rows: Rows) -> dict[int, float]:
    """Return the loss of each step in nats per target, from its documents."""
    sums: dict[int, list[float]] = {}
    for (step, *_), (tokens, nats) in rows.items():
        before = sums.setdefault(step, [0.0, 0.0])
        before[0] += nats
        before[1] += tokens
    return {step: nats / tokens for step, (nats, tokens) in sorted(sums.items())}
