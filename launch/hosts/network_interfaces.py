"""Find the network interface that leads to another host, and list this host's own addresses.

Asks the kernel's routing by connecting a datagram socket, which sends nothing. Falls back to the
default route of /proc/net/route where a host's own name resolves to loopback.
"""

import ipaddress
import socket
from pathlib import Path

import psutil

from llmsys.errors import LaunchError

ROUTES = Path("/proc/net/route")
# RFC 863; any port does, because connecting a datagram socket sends nothing
DISCARD_PORT = 9


def resolve_addresses(host: str) -> list[str]:
    """Resolve a host name on this host.

    Args:
        host: Name or address.

    Returns:
        Its addresses, without repeats, in the resolver's order.

    Raises:
        LaunchError: The name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"the name {host} cannot be resolved on {socket.gethostname()} ({error.strerror}). "
            "Use its address, or add it to DNS or to /etc/hosts on every host."
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address.

    Args:
        address: IPv4 or IPv6 address, with or without a `%scope`.

    Returns:
        True for 127.0.0.0/8 and ::1.
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def list_local_addresses() -> dict[str, str]:
    """Return address → interface for every interface of this host."""
    return {
        # psutil writes a link-local address with its interface: fe80::1%eth0
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def is_this_host(host: str) -> bool:
    """Return whether a name or address belongs to this machine.

    Args:
        host: Name or address.

    Returns:
        True where any address of it is loopback or local.

    Raises:
        LaunchError: The name cannot be resolved.
    """
    mine = list_local_addresses()
    return any(is_loopback(address) or address in mine for address in resolve_addresses(host))


def get_loopback_interface() -> str | None:
    """Return the loopback interface.

    Returns:
        The interface of 127.0.0.1 (lo on Linux); None without one.
    """
    return list_local_addresses().get("127.0.0.1")


def find_interface_to(host: str) -> str:
    """Find the interface over which this host reaches another.

    Args:
        host: Name or address. This host's own name gives the interface that others reach it by.

    Returns:
        Name of the interface.

    Raises:
        LaunchError: Only loopback leads there.
    """
    for address in resolve_addresses(host):
        source = _find_source_address(address)
        if (
            source is not None
            and not is_loopback(source)
            and (name := list_local_addresses().get(source))
        ):
            return name
    if (name := find_default_interface()) is not None:
        return name
    raise LaunchError(
        f"no network interface of {socket.gethostname()} except loopback has a route to {host}, "
        "the host of rank 0. Use an address of that host that all hosts reach, or set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
    )


def _find_source_address(address: str) -> str | None:
    """Return this host's source address for packets to another; None without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # the kernel chooses a route and a source address, and sends nothing
            probe.connect((address, DISCARD_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def find_default_interface(routes: Path = ROUTES) -> str | None:
    """Return the interface of the default route with the lowest metric, else the only interface
    with a route.
    """
    try:
        # the first line names the columns: 0 interface, 1 destination in hex, 6 metric
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return None
    defaults = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000" and row[0] != "lo"]
    if defaults:
        return min(defaults)[1]
    others = {row[0] for row in rows} - {"lo"}
    return others.pop() if len(others) == 1 else None
