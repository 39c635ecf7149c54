"""What every test may rely on: one thread per process, no network, no trace of the shell that
started pytest.

`LLMSYS_TEST_THREADS` is the number of threads of `make numerics`.
"""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before any test imports a library that reads these, and inherited by the processes that tests
# start.
os.environ.update(
    {
        "OMP_NUM_THREADS": os.environ.get("LLMSYS_TEST_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # tests of the rule itself leave it out
        "LLMSYS_TRUST_CODE": "1",
        # runs of tests measure no machine
        "LLMSYS_MACHINE_PROFILE": "none",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
)
for variable in (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LLMSYS_PARENT",
):
    os.environ.pop(variable, None)

# Where it is set, as in many containers, every process that a test starts compiles torch again,
# which takes as long as everything else that most of them do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell's `&` and `nohup` ignore signals, and what is ignored stays so in every child. A handler
# that does nothing keeps pytest as deaf as it was, and is the default again in the processes that
# tests start.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def sample_crawl() -> Path:
    """The folder with the two WARC shards that `make demo` reads."""
    return ROOT / "tests" / "data" / "sample_crawl"


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """What a run inside the test process sets for its process (threads, LOCAL_RANK, …) ends with
    the module.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(before["OMP_NUM_THREADS"]))


@pytest.fixture
def object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `FakeS3` that s3://crawl/… of this test lies in."""
    from tests.helpers.fake_s3 import FakeS3

    with FakeS3() as s3:
        s3.connect(monkeypatch, tmp_path / "cache")
        yield s3


@pytest.fixture
def moto_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `MotoS3` that s3://crawl/… of this test lies in."""
    from tests.helpers.moto_s3 import MotoS3

    with MotoS3() as s3:
        s3.connect(monkeypatch, tmp_path / "cache")
        yield s3


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """A connection to anything but this machine fails with a message instead of waiting for an
    answer.
    """
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not is_local(address[0]):
            raise OSError(f"a test tried to reach {address[0]}; tests use no network")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_locally)
        yield


def is_local(host: str) -> bool:
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")
