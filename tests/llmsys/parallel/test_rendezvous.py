"""Laws of the rendezvous: what torch opens for ranks and agents listens on the address of the
run and on no other.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from llmsys.parallel.port import find_free_port
from llmsys.parallel.rendezvous import choose_listen_address, open_store
from tests.helpers.process import PATIENCE_SECONDS

LOOK = """
import json, os, psutil
import torch.distributed as dist
from llmsys.parallel.process_group import init_process_group
with init_process_group():
    looked = [psutil.Process(), psutil.Process(os.getppid())]
    sockets = [one for each in looked for one in each.net_connections("tcp")]
    found = {one.laddr.ip for one in sockets if one.status == "LISTEN"}
    dist.barrier()
    with open(f"{__file__}.{os.environ['RANK']}", "w") as told:
        json.dump(sorted(found), told)
"""


def listening() -> set[str]:
    return {
        one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"
    }


@pytest.mark.parametrize(
    "words",
    [
        (
            "llmsys.launch.launchers.torchrun",
            "--nnodes=1",
            "--master-addr=127.0.0.1",
            "--master-port={port}",
        ),
        (
            "llmsys.launch.launchers.torchrun",
            "--nnodes=1:1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:{port}",
        ),
    ],
    ids=["static", "c10d"],
)
def test_neither_ranks_nor_their_agent_can_be_reached_from_another_host(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    options = [word.format(port=find_free_port()) for word in words]
    command = [
        sys.executable,
        "-m",
        *options,
        "--nproc-per-node=2",
        "--local-addr=127.0.0.1",
        str(tmp_path / "look.py"),
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"look.py.{rank}").read_text()) == ["127.0.0.1"]


def test_a_store_is_bound_to_the_address_that_its_host_means() -> None:
    before = listening()
    store = open_store(
        "127.0.0.2", find_free_port("127.0.0.2"), 1, is_master=True, multi_tenant=True
    )
    assert listening() - before == {"127.0.0.2"}
    again = dist.TCPStore("127.0.0.2", store.port, 1, is_master=False)
    again.set("a", "b")
    assert store.get("a") == b"b"


def test_a_port_that_is_taken_is_the_error_that_torch_knows() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(
            dist.DistNetworkError, match=r"127.0.0.1:\d+ is not available for listening"
        ):
            open_store("127.0.0.1", holder.getsockname()[1], 1, is_master=True)


def name(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have every name mean these addresses, of which those of 192.0.2.* are nobody's and 127.*
    are here.
    """

    def resolve(host: str, *more: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_a_name_that_means_loopback_here_is_taken_only_where_all_ranks_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name(monkeypatch, "127.0.1.1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_listen_address("debian") == "127.0.1.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_listen_address("debian") is None
    assert choose_listen_address("127.0.1.1") == "127.0.1.1"


def test_an_address_that_is_not_of_this_host_leaves_torchs_way_and_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llmsys.parallel.rendezvous._is_own", lambda address: False)
    name(monkeypatch, "192.0.2.77")
    assert choose_listen_address("service") is None
    monkeypatch.undo()
    monkeypatch.setattr("llmsys.parallel.rendezvous.choose_listen_address", lambda host: None)
    open_store("127.0.0.1", find_free_port(), 1, is_master=True)
    assert "127.0.0.1 is not an address of this host" in caplog.text
