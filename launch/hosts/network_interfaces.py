"""Which network interface leads to another host, and which addresses are this host's own.

Asks the system's routing by opening a datagram socket, which sends nothing; falls back to the default route of
/proc/net/route where a host's own name leads to loopback.
"""

import ipaddress
import socket
from pathlib import Path

import psutil

from llmsys.errors import LaunchError

ROUTES = Path("/proc/net/route")
DISCARD_PORT = 9


def resolve_addresses(host: str) -> list[str]:
    """What a name resolves to on this host, in order. Raises LaunchError where it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"the name {host} cannot be resolved on {socket.gethostname()} ({error.strerror}). "
            f"Name the host by its address, or write it into DNS or /etc/hosts of every host."
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Whether an address means the host that says it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def list_local_addresses() -> dict[str, str]:
    """Address → interface of every interface of this host."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def is_this_host(host: str) -> bool:
    """Whether a name or address is this machine's."""
    mine = list_local_addresses()
    return any(is_loopback(address) or address in mine for address in resolve_addresses(host))


def get_loopback_interface() -> str | None:
    """The interface of 127.0.0.1: lo on Linux."""
    return list_local_addresses().get("127.0.0.1")


def find_interface_to(host: str) -> str:
    """The interface over which this host reaches another, or is reached itself when `host` is its own name.

    Raises LaunchError where there is none but loopback.
    """
    for address in resolve_addresses(host):
        source = _find_source_address(address)
        if source is not None and not is_loopback(source) and (name := list_local_addresses().get(source)):
            return name
    if (name := find_default_interface()) is not None:
        return name
    raise LaunchError(
        f"no network interface of {socket.gethostname()} but loopback leads to {host}, where rank 0 is. "
        f"Name rank 0's host by an address that all hosts reach, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
    )


def _find_source_address(address: str) -> str | None:
    """This host's address on the way to another."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, DISCARD_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def find_default_interface(routes: Path = ROUTES) -> str | None:
    """The interface of the default route of least metric; without one, the only interface that any route leads over."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return None
    defaults = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000" and row[0] != "lo"]
    if defaults:
        return min(defaults)[1]
    others = {row[0] for row in rows} - {"lo"}
    return others.pop() if len(others) == 1 else None
