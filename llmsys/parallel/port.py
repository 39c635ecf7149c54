"""Find free TCP ports of this machine and describe conflicts."""

import random
import socket

LOOPBACK = "127.0.0.1"
EVERYWHERE = ""
# Linux and macOS give outgoing connections higher ports, also one that was free when it was chosen
# for a listener.
LISTENER_PORTS = range(20_000, 32_768)


def find_free_port(address: str = LOOPBACK) -> int:
    """Return a port on which nothing listens now.

    Args:
        address: The address to bind. The default is loopback.

    Returns:
        The port number. Another process may take it before the caller does.
    """
    # not the seeded generator, from which processes of one seed would choose the same port
    for port in random.SystemRandom().sample(LISTENER_PORTS, 100):
        if not describe_port_conflict(port, address):
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def describe_port_conflict(port: int, address: str = LOOPBACK) -> str:
    """Return the reason why nothing can listen on a port.

    Args:
        port: The port number.
        address: The address to bind. The default is loopback.

    Returns:
        The error text of the system. "" when the port is free.
    """
    with socket.socket() as probe:
        # connections in TIME_WAIT do not hold a port
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
