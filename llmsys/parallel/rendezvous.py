"""The rendezvous: torch's TCP store, bound to the address of the run and to no other.

torch itself listens on every interface, and unpickles what arrives.

Invariants:
- A store that this host opens for `127.0.0.1` cannot be reached from another host.
- Where the host's name gives no address, torch's behaviour is kept and a warning is
  logged.
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

# Connections that wait to be accepted: at the start all ranks connect at once.
BACKLOG = 2_048


RANK_MODULE = "torch.distributed.rendezvous"
_ELASTIC = "torch.distributed.elastic.rendezvous"
AGENT_MODULES = (f"{_ELASTIC}.c10d_rendezvous_backend", f"{_ELASTIC}.static_tcp_rendezvous")


def bind_rendezvous(*, agents: bool = False) -> None:
    """Make the stores that torch opens in this process use `open_store`.

    Args:
        agents: Whether to patch torchrun's agents too.
    """
    for name in (RANK_MODULE, *(AGENT_MODULES if agents else ())):
        # These modules have imported the name, so it is replaced in each of them.
        vars(importlib.import_module(name))["TCPStore"] = open_store


def open_store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(seconds=300),
    **options: Any,
) -> dist.TCPStore:
    """Return torch's TCP store, with the arguments of its constructor; the listening one is bound
    to one address.

    Raises:
        DistNetworkError: The port is taken, as torch itself raises.
    """
    address = choose_listen_address(host_name) if is_master else None
    if address is None:
        if is_master:
            log.warning(
                "%s is not an address of this host, so the rendezvous listens on all network "
                "interfaces. Name the first host by one of its addresses if the network is not "
                "trusted.",
                host_name,
            )
        return dist.TCPStore(host_name, port, world_size, is_master, timeout, **options)
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # A run that restarts gets its port although connections of the last attempt are in
        # TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise dist.DistNetworkError(
            f"{address}:{port} is not available for listening: {error.strerror}"
        ) from error
    # Detached, since the store closes the socket.
    port = listening.getsockname()[1]
    fd = listening.detach()
    return dist.TCPStore(
        address, port, world_size, is_master, timeout, master_listen_fd=fd, **options
    )


def choose_listen_address(host: str) -> str | None:
    """Choose the address of this host that other hosts reach by its name.

    A name that resolves to loopback here (Debian's 127.0.1.1) may resolve to another address
    elsewhere; it is taken only where all ranks are on this host.

    Args:
        host: Name or address by which ranks reach the store.

    Returns:
        The address, or None where it cannot be determined.
    """
    try:
        addresses = [
            str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        ]
    except OSError:
        return None
    outward = [address for address in addresses if not _is_loopback(address)]
    if (
        not outward
        and addresses
        and (host == "localhost" or host in addresses or _has_all_ranks_here())
    ):
        return addresses[0]
    return next((address for address in outward if _is_own(address)), None)


# Link-local IPv6 addresses carry a scope: fe80::1%eth0.
def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _has_all_ranks_here() -> bool:
    ranks = os.environ.get("WORLD_SIZE")
    return ranks is not None and ranks == os.environ.get("LOCAL_WORLD_SIZE")


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            # Only an address of this host can be bound; port 0 takes any free one.
            probe.bind((address, 0))
        except OSError:
            return False
    return True
