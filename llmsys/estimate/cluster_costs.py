"""Prices, power and failures of a cluster: stated assumptions, none measured here.

Reads a YAML file over the defaults below; every answer in money, energy or whole-run hours prints
them.
"""

from itertools import pairwise
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from llmsys.config.loading.merge import ConfigLayer
from llmsys.config.loading.validation_errors import build_config_error
from llmsys.config.section import Section
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import (
    DeviceProfile,
    Interconnect,
    OuterLink,
    load_device_profile,
    read_profile_values,
)


class NetworkLevel(Section):
    """A level of the network, the innermost first: the machine or NVLink domain, the rail, the
    spine.
    """

    devices: int = Field(ge=1, description="Devices that the level connects.")
    bandwidth: float = Field(
        gt=0, description="Bandwidth of one device in one direction, in bytes per second."
    )
    latency_seconds: float = Field(
        15e-6, ge=0, description="Minimum latency of one hop of a collective, in seconds."
    )
    oversubscription: float = Field(
        1.0,
        ge=1,
        description="Bandwidth of the level below / bandwidth that the level can carry for all at "
        "once.",
    )


class ClusterCosts(Section):
    """Prices, power and failures of the place where a run is to happen."""

    device: str = Field("h100-sxm", description="Name or file of the device profile.")
    devices: int = Field(8, ge=1, description="Number of devices.")
    host_memory_bytes: float = Field(
        2e12, gt=0, description="Host memory of one machine for offloaded state, in bytes."
    )
    network: tuple[NetworkLevel, ...] = Field(
        (),
        description="Levels of the network, innermost first. Empty: `node` and `network` of the "
        "device profile.",
    )
    currency: str = Field("USD", description="Currency of prices.")
    price_per_hour: float = Field(
        2.5, ge=0, allow_inf_nan=False, description="Price of one accelerator-hour, all inclusive."
    )
    price_per_kwh: float = Field(
        0.0,
        ge=0,
        description="Price of one kWh if electricity is paid separately; rented hours include it.",
    )
    power_share: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Mean power of an accelerator in training / its power limit; measured values "
        "are 0.7 to 1.",
    )
    host_watts: float = Field(
        180,
        ge=0,
        description="Power of the rest of the machine per accelerator, in watts (DGX H100: at "
        "most 10.2 kW with eight of 700 W; a third of the rest).",
    )
    pue: float = Field(
        1.1,
        ge=1,
        description="Power usage effectiveness (PUE): power of the site / power of the machines.",
    )
    device_failure_hours: float = Field(
        50_000,
        gt=0,
        description="Mean hours of one accelerator between interruptions of its run (Llama 3, "
        "3.3.4: 419 in 54 days of 16,384 GPUs).",
    )
    save_seconds: float = Field(
        30,
        ge=0,
        description="Training stall per checkpoint, in seconds. With checkpoint.mode=async it is "
        "the copy of the state to host memory, where that is shorter.",
    )
    restart_seconds: float = Field(
        600, ge=0, description="Time from a failure to the next step, in seconds."
    )
    other_loss: float = Field(
        0.03, ge=0, lt=1, description="Share of time lost otherwise: slow machines, skipped steps."
    )
    expert_load: float = Field(
        1.0,
        ge=1,
        le=1_000,
        description="Tokens of the fullest rank of experts / mean of the ranks; all wait for it "
        "in each layer.",
    )
    straggler: float = Field(
        0.0,
        ge=0,
        description="Extra time of the slowest device / time of the others; all wait for it in "
        "every step.",
    )

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        sizes = [level.devices for level in self.network]
        if any(later <= earlier or later % earlier for earlier, later in pairwise(sizes)):
            listed = ", ".join(map(str, sizes))
            raise ValueError(
                f"network has levels of {listed} devices: each must be a multiple of the one "
                "before."
            )
        return self

    def load_device(self) -> DeviceProfile:
        """Load the device profile, with the network of the cluster instead of the profile's.

        Returns:
            The profile.
        """
        device = load_device_profile(self.device)
        if not self.network:
            return device
        links = [
            Interconnect(
                bandwidth=level.bandwidth / level.oversubscription,
                latency_seconds=level.latency_seconds,
            )
            for level in self.network
        ]
        outer = {"network": links[1]} if len(links) > 1 else {}
        levels = tuple(
            OuterLink(devices=level.devices, link=link)
            for level, link in zip(self.network[1:-1], links[2:], strict=True)
        )
        first = {"node_devices": self.network[0].devices, "node": links[0]}
        return device.model_copy(update=first | outer | {"outer_links": levels})


def load_cluster_costs(path: Path) -> ClusterCosts:
    """Load the prices, power and failures of a cluster from YAML.

    Args:
        path: file with fields of ClusterCosts; left-out ones have their defaults.

    Returns:
        The validated costs.

    Raises:
        ConfigError: the file is missing, or a field is wrong (with its line).
    """
    if not path.is_file():
        raise ConfigError(
            f"cluster file {path} does not exist. Write one with the keys device and devices."
        )
    values, lines = read_profile_values(path)
    if values is None:
        raise ConfigError(
            f"cluster file {path} is empty. Write at least the keys device and devices."
        )
    try:
        return ClusterCosts.model_validate(values)
    except ValidationError as error:
        origins = {keys: f"{path.name}:{line}" for keys, line in lines.items()}
        given = values if isinstance(values, dict) else {}
        raise build_config_error(
            error, ClusterCosts, ConfigLayer(given, origins), path.name
        ) from None
