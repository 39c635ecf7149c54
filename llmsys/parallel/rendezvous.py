"""Where ranks meet: torch's TCP store, listening on the address of the run and on no other.

Reads the host that every rank is told to meet at; gives torch's rendezvous a store that is bound to that address. Left
alone, torch listens on every interface, and unpickles what arrives.

Invariants:
- A store that this host opens for `127.0.0.1` cannot be reached from another host.
- Where no own address can be told from the host's name, torch's way stays, and a warning says so.
"""

import importlib
import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from llmsys.log import get_logger

log = get_logger(__name__)

BACKLOG = 2_048


RANK_MODULE = "torch.distributed.rendezvous"
_ELASTIC = "torch.distributed.elastic.rendezvous"
AGENT_MODULES = (f"{_ELASTIC}.c10d_rendezvous_backend", f"{_ELASTIC}.static_tcp_rendezvous")


def bind_rendezvous(*, agents: bool = False) -> None:
    """Have the stores that torch opens in this process listen as `open_store` does; with `agents`, torchrun's too."""
    for name in (RANK_MODULE, *(AGENT_MODULES if agents else ())):
        vars(importlib.import_module(name))["TCPStore"] = open_store


def open_store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(seconds=300),
    **options: Any,
) -> dist.TCPStore:
    """Return torch's TCP store, with the arguments of its constructor; the one that listens is bound to an address.

    Raises torch's DistNetworkError where the port is taken, as torch itself does.
    """
    where = choose_listen_address(host_name) if is_master else None
    if where is None:
        if is_master:
            log.warning(
                "%s is no address of this host's network interfaces, so that ranks meet on all of them. Name the first "
                "host by its own address where the network cannot be trusted.",
                host_name,
            )
        return dist.TCPStore(host_name, port, world_size, is_master, timeout, **options)
    listening = socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((where, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise dist.DistNetworkError(f"{where}:{port} cannot be listened on: {error.strerror}") from error
    number = listening.getsockname()[1]
    return dist.TCPStore(where, number, world_size, is_master, timeout, master_listen_fd=listening.detach(), **options)


def choose_listen_address(host: str) -> str | None:
    """Return the address of this host that `host` means to the others; None where it cannot be told.

    A name that means loopback here (Debian's 127.0.1.1) may mean another address elsewhere; it is taken only where
    all ranks are on this host.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    outward = [address for address in found if not _is_loopback(address)]
    if not outward and found and (host == "localhost" or host in found or _are_all_ranks_here()):
        return found[0]
    return next((address for address in outward if _is_own(address)), None)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _are_all_ranks_here() -> bool:
    ranks = os.environ.get("WORLD_SIZE")
    return ranks is not None and ranks == os.environ.get("LOCAL_WORLD_SIZE")


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
