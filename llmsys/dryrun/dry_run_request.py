"""The question that one dry run answers: a config, a rank of a cluster, a device, and the loads
to assume.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DryRunRequest:
    """A dry run of one rank.

    Attributes:
        config: name or path of the config.
        overrides: values of the config, such as `batch.sequence_length=1024`.
        nodes: number of machines.
        node_devices: devices, and so ranks, of each machine.
        rank: the rank that is run.
        device: name or path of a device profile.
        documents: lengths of documents in tokens; empty: one document per sequence.
        expert_skew: load of this rank's experts over the mean load.
    """

    config: str
    overrides: tuple[str, ...]
    nodes: int
    node_devices: int
    rank: int
    device: str
    documents: tuple[int, ...] = ()
    expert_skew: float = 1.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.node_devices

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DryRunRequest":
        """Return the request that `to_dict` wrote."""
        lists = {name: tuple(values[name]) for name in ("overrides", "documents")}
        return cls(**values | lists)


def format_dry_run_command(
    config: str, overrides: Sequence[str], nodes: int, devices: int, device: str
) -> str:
    """Return the command of a dry run, for a shell.

    Args:
        config: config as it was given.
        overrides: values of the config.
        nodes: machines.
        devices: devices of each machine.
        device: name of a profile, or a file.

    Returns:
        A line that works as it is printed.
    """
    return shlex.join(
        [
            "llmsys",
            "dryrun",
            str(config),
            *overrides,
            f"nodes={nodes}:{devices}",
            f"device={device}",
        ]
    )
