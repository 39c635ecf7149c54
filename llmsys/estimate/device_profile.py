"""One kind of accelerator as data: what it can do at best, how close programs come to it, with
sources.

Reads a YAML profile: one that came with llmsys (`devices/`), or one that `llmsys calibrate`
measured. Promises that a device nobody described is refused by name; numbers of another device
never stand in for it.
"""

import difflib
import os
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from llmsys.config.loading.merge import ConfigLayer
from llmsys.config.loading.validation_errors import build_config_error
from llmsys.config.loading.yaml_files import Keys, parse_yaml
from llmsys.config.section import Section
from llmsys.errors import ConfigError, format_choices
from llmsys.storage.paths import require_local_path

FOLDER = Path(__file__).with_name("devices")
# Set by `llmsys train` for its ranks: the file of a probe of this machine (launchers/run_probe.py).
MACHINE_PROFILE = "LLMSYS_MACHINE_PROFILE"
# The value with which nothing is measured.
NOT_MEASURED = "none"
Number = Literal["fp32", "bf16", "fp16", "fp8", "nvfp4"]
ModelClass = Literal["dense", "moe"]


class Interconnect(Section):
    """A way between devices. Bandwidth is that of one device in one direction, latency that of
    one hop.
    """

    bandwidth: float = Field(
        gt=0, description="Bandwidth of one device in one direction, in bytes per second."
    )
    latency_seconds: float = Field(
        ge=0, description="Minimum latency of one hop of a collective, in seconds."
    )


class OuterLink(Section):
    """A link between more devices than those that a level below connects."""

    devices: int = Field(ge=1, description="Devices up to which the level below connects.")
    link: Interconnect = Field(description="Link beyond them, per device.")


class KernelEfficiency(Section):
    """Share of the peak that large kernels reach: 1 is all of it.

    A product takes flops / (peak · products) + bytes / (memory_bandwidth · memory) +
    launch_seconds, which is the curve over shapes: the second part is what small or thin matrices
    suffer from.
    """

    products: float = Field(
        gt=0, le=1, description="Efficiency of large matmuls, as a share of peak_flops."
    )
    products_fp8: float = Field(
        0.6, gt=0, le=1, description="Efficiency of 8-bit matmuls, as a share of their peak."
    )
    grouped: float = Field(
        gt=0, le=1, description="Efficiency of grouped expert matmuls, as a share of peak_flops."
    )
    attention: float = Field(
        gt=0,
        le=1,
        description="Efficiency of torch's fused attention forward, as a share of peak_flops.",
    )
    attention_backward: float = Field(
        gt=0,
        le=1,
        description="Efficiency of torch's fused attention backward, as a share of peak_flops.",
    )
    native_attention: float = Field(
        1.0, ge=1, description="Speedup of attention kernels written for this device."
    )
    memory: float = Field(
        gt=0, le=1, description="Efficiency of elementwise kernels, as a share of memory_bandwidth."
    )
    links: float = Field(
        gt=0, le=1, description="Efficiency of large collectives, as a share of the link bandwidth."
    )
    launch_seconds: float = Field(
        ge=0, description="Time between two kernels on the device, in seconds."
    )
    host_seconds: float = Field(
        ge=0, description="Time the host needs to launch one kernel in eager mode, in seconds."
    )


class RunResidual(Section):
    """Measured over modelled step times on the device; `llmsys reconcile --update` writes it."""

    factor: float = Field(gt=0, description="Measured / estimated time, median of the runs.")
    spread: float = Field(ge=0, description="Standard deviation of its natural logarithm.")
    runs: dict[str, float] = Field(
        description="Measured / estimated time of each run, by run folder."
    )


class DeviceProfile(Section):
    """A profile. Peaks are dense (no sparsity), per device; `sources` says where the numbers of
    each field are from.
    """

    format_version: Literal[1] = Field(1, description="Version of the format of the file.")
    name: str = Field(min_length=1, description="Display name.")
    peak_flops: dict[Number, float] = Field(description="Peak FLOP/s of matmuls, by dtype.")
    memory_bytes: float = Field(gt=0, description="Memory that a program can allocate, in bytes.")
    memory_bandwidth: float = Field(
        gt=0, description="Memory bandwidth in bytes per second, reads and writes together."
    )
    node_devices: int = Field(
        8, ge=1, description="Number of devices in one machine, connected by `node`."
    )
    node: Interconnect | None = Field(
        None, description="Link between devices of one machine. null: not measured."
    )
    network: Interconnect | None = Field(
        None, description="Link between machines, per device. null: not measured."
    )
    outer_links: tuple[OuterLink, ...] = Field(
        (),
        description="Further levels of the network, innermost first, from those of a cluster file.",
    )
    host_bandwidth: float = Field(
        25e9, gt=0, description="Bandwidth between a device and host memory, in bytes per second."
    )
    watts: float | None = Field(
        None, gt=0, description="Power limit of one device, in watts. null: unknown."
    )
    compute_capability: tuple[int, int] | None = Field(
        None,
        description="CUDA compute capability, such as [9, 0], by which kernels are chosen. null: "
        "no CUDA device.",
    )
    driver_names: tuple[str, ...] = Field(
        (), description="Names that the driver reports, by which a run finds its profile."
    )
    residual: dict[ModelClass, RunResidual] = Field(
        {},
        description="Fitted residuals by class of model; a class without one uses that of the "
        "published rows.",
    )
    efficiency: KernelEfficiency = Field(description="Efficiencies and latencies of kernels.")
    sources: dict[str, str] = Field(description="Sources of the numbers, by field.")

    def get_interconnect(self, kind: Literal["node", "network"]) -> Interconnect:
        """One of the links; ConfigError when the profile has none."""
        found = self.node if kind == "node" else self.network
        if found is None:
            between = "devices of one machine" if kind == "node" else "machines"
            raise ConfigError(
                f"the profile of {self.name} has no {kind} link, but this layout communicates "
                f"between {between}. Add {kind}: {{bandwidth: …, latency_seconds: …}} in it, or "
                "calibrate with --processes."
            )
        return found

    def get_network(self, extent: int) -> Interconnect:
        """Return the slowest link on the way between ranks on several machines, numbered up to
        `extent` apart.
        """
        passed = [one.link for one in self.outer_links if extent > one.devices]
        return min([self.get_interconnect("network"), *passed], key=lambda link: link.bandwidth)

    def get_peak_flops(self, number: Number) -> float:
        """Return the peak operations per second.

        Args:
            number: number type of the matmuls.

        Raises:
            ConfigError: this device has no such matmuls.
        """
        if number not in self.peak_flops:
            known = format_choices(sorted(self.peak_flops))
            raise ConfigError(
                f"{self.name} has no peak for {number} matmuls. Use {known}, or give "
                f"peak_flops.{number} in a profile."
            )
        return self.peak_flops[number]


def list_device_names() -> list[str]:
    """List the profiles that came with llmsys.

    Returns:
        Names that `load_device_profile` takes, sorted.
    """
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_device_by_driver_name(driver_name: str) -> DeviceProfile | None:
    """Find the shipped profile of an accelerator by its driver's name.

    Args:
        driver_name: as `torch.cuda.get_device_name` returns it.

    Returns:
        The profile; None where no shipped one has that name.
    """
    return next(
        (
            one
            for one in map(_load_packaged_profile, list_device_names())
            if driver_name in one.driver_names
        ),
        None,
    )


def load_device_profile(name: str) -> DeviceProfile:
    """Load a device profile.

    Args:
        name: name of a shipped profile, or path of a YAML file.

    Returns:
        The validated profile.

    Raises:
        ConfigError: unknown name (with the known ones), or a wrong field in a file.
    """
    if (FOLDER / f"{name}.yaml").is_file():
        return _load_packaged_profile(name)
    if not require_local_path(name, "device").is_file():
        raise ConfigError(_format_unknown_device(name))
    return _load_profile(Path(name))


def load_machine_profile() -> DeviceProfile | None:
    """Load the profile that `llmsys train` has measured for this run.

    Returns:
        The profile of a rank's device; None where nothing was measured, or its file is gone.
    """
    file = Path(os.environ.get(MACHINE_PROFILE) or NOT_MEASURED)
    return load_device_profile(str(file)) if file.is_file() else None


@cache
def _load_packaged_profile(name: str) -> DeviceProfile:
    return _load_profile(FOLDER / f"{name}.yaml")


def _load_profile(path: Path) -> DeviceProfile:
    values, lines = read_profile_values(path)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path.name} is not a device profile. Write one with `llmsys calibrate --output "
            f"{path}`."
        )
    try:
        return DeviceProfile.model_validate(values)
    except ValidationError as error:
        origins = {keys: f"{path.name}:{line}" for keys, line in lines.items()}
        raise build_config_error(
            error, DeviceProfile, ConfigLayer(values, origins), path.name
        ) from None


def read_profile_values(path: Path) -> tuple[Any, dict[Keys, int]]:
    """Read the values of a profile, a cluster or a program.

    Args:
        path: YAML file.

    Returns:
        The value (None for an empty file), and the line of every key path, counted from 1.

    Raises:
        ConfigError: the file is not text, or not YAML.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path.name} is not UTF-8 text: {error.reason} at byte {error.start}. Give a YAML "
            "file."
        ) from None


def _format_unknown_device(name: str) -> str:
    known = list_device_names()
    # h100 is h100-sxm, and not v100, which is closer by letters
    word = name.lower().replace("_", "-")
    # 4090 is rtx-4090
    begun = [one for one in known if one.startswith(word) or one.endswith(f"-{word}")]
    begun = begun or difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    # h1000 is nearer to h100-sxm than to v100
    begun = begun or [one for one in known if word.startswith(one.partition("-")[0])]
    close = begun or difflib.get_close_matches(word, known, n=1)
    hint = f" Did you mean {' or '.join(close[:2])}?" if close else ""
    return (
        f"{name!r} has no device profile, and no other profile is used instead.{hint} Known: "
        f"{', '.join(known)}. Measure this machine with `llmsys calibrate --output "
        f"{Path(name).stem or 'mine'}.yaml` and give that file."
    )
