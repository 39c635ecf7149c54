"""Seconds of collectives between ranks, by volume, group and links.

A group is said by its size and by the distance of its neighbours in rank numbers: that tells how many of its members
share a machine. Ring algorithms: Thakur 2005; the bus bandwidths are those of nccl-tests' PERFORMANCE.md.
"""

from dataclasses import dataclass
from math import inf

from llmsys.estimate.device import Device


@dataclass(frozen=True)
class Group:
    """Ranks that talk: how many, and how far apart two neighbours are numbered."""

    size: int
    stride: int = 1

    def per_node(self, device: Device) -> int:
        """Members on one machine."""
        return max(1, min(self.size, device.node_devices // self.stride))

    def nodes(self, device: Device) -> int:
        """Machines that it spans."""
        return -(-self.size // self.per_node(device))


def gather_seconds(group: Group, whole_bytes: float, device: Device) -> float:
    """All-gather of `whole_bytes` together, or reduce-scatter of as many, on a ring.

    Every rank sends (n − 1)/n of the whole. Between machines, the adapters of all members on one work together.
    """
    if group.size == 1 or whole_bytes == 0:
        return 0.0
    local, nodes = group.per_node(device), group.nodes(device)
    inside = device.link("node").bandwidth if local > 1 else inf
    bandwidth = inside if nodes == 1 else min(inside, device.link("network").bandwidth * local)
    volume = whole_bytes * (group.size - 1) / group.size
    return volume / (bandwidth * device.efficiency.links) + _ring_latency(group, device)


def reduce_seconds(group: Group, whole_bytes: float, device: Device) -> float:
    """All-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(group, whole_bytes, device)


def exchange_seconds(group: Group, sent_bytes: float, device: Device) -> float:
    """All-to-all in which every rank sends `sent_bytes`, its own part included.

    What stays on the machine and what leaves it travel at once; the slower of both counts.
    """
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    local = group.per_node(device)
    inside = sent_bytes * (local - 1) / group.size / device.link("node").bandwidth if local > 1 else 0.0
    if group.nodes(device) == 1:
        return inside / device.efficiency.links + device.link("node").latency_seconds
    outside = sent_bytes * (group.size - local) / group.size / device.link("network").bandwidth
    return max(inside, outside) / device.efficiency.links + device.link("network").latency_seconds


def send_seconds(sent_bytes: float, device: Device, *, between_nodes: bool) -> float:
    """One rank to one other."""
    link = device.link("network" if between_nodes else "node")
    return sent_bytes / (link.bandwidth * device.efficiency.links) + link.latency_seconds


def _ring_latency(group: Group, device: Device) -> float:
    local, nodes = group.per_node(device), group.nodes(device)
    inside = (local - 1) * device.link("node").latency_seconds if local > 1 else 0.0
    return inside + ((nodes - 1) * device.link("network").latency_seconds if nodes > 1 else 0.0)
