"""Ports for listeners are not those of outgoing connections, and a port in use is left out."""

import socket
from unittest.mock import patch

from llmsys.parallel import port
from llmsys.parallel.port import describe_port_conflict, find_free_port


def test_a_free_port_is_below_those_of_outgoing_connections() -> None:
    # the first of them on Linux, unless the machine has another setting
    assert port.LISTENER_PORTS.stop <= 32_768
    found = {find_free_port() for _ in range(20)}
    assert found <= set(port.LISTENER_PORTS)
    assert len(found) > 1


def test_a_port_with_a_listener_is_left_out() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken = listening.getsockname()[1]
        assert describe_port_conflict(taken) == "Address already in use"
        with patch.object(port, "LISTENER_PORTS", [taken] * 100):
            assert find_free_port() != taken
