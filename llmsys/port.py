"""TCP ports of this machine: one that is free, and why one cannot be had."""

import socket

LOOPBACK, EVERYWHERE = "127.0.0.1", ""


def find_free_port(address: str = LOOPBACK) -> int:
    """A port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def describe_port_conflict(port: int, address: str = LOOPBACK) -> str:
    """Why nothing can listen on a port, in the system's words; "" when something can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
