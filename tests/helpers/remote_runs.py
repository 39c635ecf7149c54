"""Training processes on any number of ranks, without a launcher, that are killed at the upload
of one file.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.ranks import PRELOADED

LEASE_SECONDS = 0.5


def train_ranks(words: Sequence[str], world_size: int, cache: Path, fatal: str = "") -> list[int]:
    """Train with processes of a machine whose copies lie in `cache`; return their exit codes, all
    -9 if one was killed.

    Each rank kills itself when it begins to upload a file whose name contains `fatal`.
    """
    from llmsys.parallel.port import find_free_port

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    environment = {
        **os.environ,
        "LLMSYS_CACHE": str(cache),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
    }
    environment |= {"MASTER_PORT": str(find_free_port()), "LOCAL_WORLD_SIZE": str(world_size)}
    processes = [
        context.Process(target=_train_rank, args=(rank, environment, list(words), fatal))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    while all(process.exitcode is None for process in processes):
        multiprocessing.connection.wait([process.sentinel for process in processes])
    if any(process.exitcode for process in processes):
        for process in processes:
            process.kill()
    for process in processes:
        process.join()
    return [process.exitcode or 0 for process in processes]


def _train_rank(rank: int, environment: dict[str, str], words: list[str], fatal: str) -> None:
    os.environ.clear()
    os.environ |= environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    from llmsys.config.loading.load import load_run_config
    from llmsys.storage import object_lock
    from llmsys.storage.object_store import ObjectFolder
    from llmsys.train.build_trainer import train_run

    object_lock.LEASE_SECONDS, object_lock.POLL_SECONDS = LEASE_SECONDS, 0.05
    upload = ObjectFolder.upload

    def upload_or_die(self: ObjectFolder, path: Path, name: str) -> Any:
        if fatal and fatal in name:
            os.kill(os.getpid(), signal.SIGKILL)
        return upload(self, path, name)

    ObjectFolder.upload = upload_or_die  # type: ignore[method-assign]
    train_run(load_run_config(words[0], words[1:]), lambda *_: [])
