"""Seconds of collectives between ranks, by volume, group and links.

A group is said by its size and by the distance of its neighbours in rank numbers: that tells how many of its members
share a machine. Ring algorithms: Thakur 2005; the bus bandwidths are those of nccl-tests' PERFORMANCE.md.
"""

from dataclasses import dataclass
from math import inf

from llmsys.estimate.device import DeviceProfile


@dataclass(frozen=True)
class RankGroup:
    """Ranks that talk: how many, and how far apart two neighbours are numbered."""

    size: int
    stride: int = 1

    def count_ranks_per_node(self, device: DeviceProfile) -> int:
        """Members on one machine."""
        return max(1, min(self.size, device.node_devices // self.stride))

    def count_nodes(self, device: DeviceProfile) -> int:
        """Machines that it spans."""
        return -(-self.size // self.count_ranks_per_node(device))


def estimate_all_gather_seconds(group: RankGroup, whole_bytes: float, device: DeviceProfile) -> float:
    """All-gather of `whole_bytes` together, or reduce-scatter of as many, on a ring.

    Every rank sends (n − 1)/n of the whole. Between machines, the adapters of all members on one work together.
    """
    if group.size == 1 or whole_bytes == 0:
        return 0.0
    local, nodes = group.count_ranks_per_node(device), group.count_nodes(device)
    inside = device.get_interconnect("node").bandwidth if local > 1 else inf
    bandwidth = inside if nodes == 1 else min(inside, device.get_interconnect("network").bandwidth * local)
    volume = whole_bytes * (group.size - 1) / group.size
    return volume / (bandwidth * device.efficiency.links) + _estimate_ring_latency(group, device)


def estimate_all_reduce_seconds(group: RankGroup, whole_bytes: float, device: DeviceProfile) -> float:
    """All-reduce: a reduce-scatter and an all-gather."""
    return 2 * estimate_all_gather_seconds(group, whole_bytes, device)


def estimate_all_to_all_seconds(group: RankGroup, sent_bytes: float, device: DeviceProfile) -> float:
    """All-to-all in which every rank sends `sent_bytes`, its own part included.

    What stays on the machine and what leaves it travel at once; the slower of both counts.
    """
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    local = group.count_ranks_per_node(device)
    inside = sent_bytes * (local - 1) / group.size / device.get_interconnect("node").bandwidth if local > 1 else 0.0
    if group.count_nodes(device) == 1:
        return inside / device.efficiency.links + device.get_interconnect("node").latency_seconds
    outside = sent_bytes * (group.size - local) / group.size / device.get_interconnect("network").bandwidth
    return max(inside, outside) / device.efficiency.links + device.get_interconnect("network").latency_seconds


def estimate_send_seconds(sent_bytes: float, device: DeviceProfile, *, between_nodes: bool) -> float:
    """One rank to one other."""
    link = device.get_interconnect("network" if between_nodes else "node")
    return sent_bytes / (link.bandwidth * device.efficiency.links) + link.latency_seconds


def _estimate_ring_latency(group: RankGroup, device: DeviceProfile) -> float:
    local, nodes = group.count_ranks_per_node(device), group.count_nodes(device)
    inside = (local - 1) * device.get_interconnect("node").latency_seconds if local > 1 else 0.0
    return inside + ((nodes - 1) * device.get_interconnect("network").latency_seconds if nodes > 1 else 0.0)
