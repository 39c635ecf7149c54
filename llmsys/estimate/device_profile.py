"""One kind of accelerator as data: what it can do at best, how close programs come to it, with sources.

Reads a YAML profile: one that came with llmsys (`devices/`), or one that `llmsys calibrate` measured. Promises that a
device nobody described is refused by name; numbers of another device never stand in for it.
"""

import difflib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from llmsys.config.merge import ConfigLayer
from llmsys.config.section import Section
from llmsys.config.validation_errors import build_config_error
from llmsys.config.violation import format_choices
from llmsys.config.yaml_parser import parse_yaml
from llmsys.errors import ConfigError
from llmsys.local_path import require_local_path

FOLDER = Path(__file__).with_name("devices")
Number = Literal["fp32", "bf16", "fp16", "fp8"]
ModelClass = Literal["dense", "moe"]


class Interconnect(Section):
    """A way between devices. Bandwidth is that of one device in one direction, latency that of one hop."""

    bandwidth: float = Field(gt=0, description="Bytes per second that one device sends while it receives as many.")
    latency_seconds: float = Field(ge=0, description="Seconds that one hop of a collective takes at least.")


class KernelEfficiency(Section):
    """Share of the peak that large kernels reach: 1 is all of it.

    A product takes flops / (peak · products) + bytes / (memory_bandwidth · memory) + launch_seconds, which is the curve
    over shapes: the second part is what small or thin matrices suffer from.
    """

    products: float = Field(gt=0, le=1, description="Large matrix products, of peak_flops.")
    products_fp8: float = Field(0.6, gt=0, le=1, description="The same in 8 bits, of their higher peak.")
    grouped: float = Field(gt=0, le=1, description="Products of many experts in one kernel, of peak_flops.")
    attention: float = Field(gt=0, le=1, description="Fused attention forward as torch has it, of peak_flops.")
    attention_backward: float = Field(gt=0, le=1, description="Fused attention backward.")
    native_attention: float = Field(
        1.0, ge=1, description="How much faster attention is where kernels are written for this very device."
    )
    memory: float = Field(gt=0, le=1, description="Elementwise kernels, of memory_bandwidth.")
    links: float = Field(gt=0, le=1, description="Collectives of many megabytes, of a link's bandwidth.")
    launch_seconds: float = Field(ge=0, description="Seconds between two kernels on the device.")
    host_seconds: float = Field(ge=0, description="Seconds the host needs to start one kernel in eager mode.")


class RunResidual(Section):
    """Measured over modelled step times on the device; `llmsys reconcile --update` writes it."""

    factor: float = Field(gt=0, description="Measured over modelled, the median of the runs.")
    spread: float = Field(ge=0, description="Standard deviation of its logarithm.")
    runs: dict[str, float] = Field(description="Measured over modelled of each run, by its folder.")


class DeviceProfile(Section):
    """A profile. Peaks are dense (no sparsity), per device; `sources` says where the numbers of each field are from."""

    name: str = Field(min_length=1, description="What reports call it.")
    peak_flops: dict[Number, float] = Field(description="Operations per second of matrix products, by number type.")
    memory_bytes: float = Field(gt=0, description="Memory a program can allocate, in bytes.")
    memory_bandwidth: float = Field(gt=0, description="Bytes per second, reads and writes together.")
    node_devices: int = Field(8, ge=1, description="Devices that reach each other over `node`.")
    node: Interconnect | None = Field(None, description="Between devices of one machine; null: never measured.")
    network: Interconnect | None = Field(None, description="Between machines, for one device; null: never measured.")
    host_bandwidth: float = Field(25e9, gt=0, description="Bytes per second between a device and host memory.")
    watts: float | None = Field(None, gt=0, description="Power limit of one device; null: nobody said.")
    compute_capability: tuple[int, int] | None = Field(
        None, description="CUDA compute capability, such as [9, 0]: which attention kernels run; null: no CUDA device."
    )
    driver_names: tuple[str, ...] = Field((), description="What its driver calls it, so that a run finds its profile.")
    residual: dict[ModelClass, RunResidual] = Field(
        {}, description="Of steps measured on it, by class of model; a class without takes that of published rows."
    )
    efficiency: KernelEfficiency = Field(description="What kernels reach.")
    sources: dict[str, str] = Field(description="Where the numbers are from, by field.")

    def get_interconnect(self, kind: Literal["node", "network"]) -> Interconnect:
        """One of the links; ConfigError when the profile has none."""
        found = self.node if kind == "node" else self.network
        if found is None:
            between = "devices of one machine" if kind == "node" else "machines"
            raise ConfigError(
                f"the profile of {self.name} has no {kind} link, and this layout sends between {between}. "
                f"Give {kind}: {{bandwidth: …, latency_seconds: …}} in it, or calibrate with --processes."
            )
        return found

    def get_peak_flops(self, number: Number) -> float:
        """Operations per second in `number`; ConfigError when this device has no such products."""
        if number not in self.peak_flops:
            known = format_choices(sorted(self.peak_flops))
            raise ConfigError(
                f"{self.name} has no peak for {number} products. Use {known}, or give peak_flops.{number} in a profile."
            )
        return self.peak_flops[number]


def list_device_names() -> list[str]:
    """The profiles that came with llmsys."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_device_by_driver_name(driver_name: str) -> DeviceProfile | None:
    """Find the shipped profile of an accelerator by its driver's name.

    Args:
        driver_name: as `torch.cuda.get_device_name` returns it.

    Returns:
        The profile; None where no shipped one has that name.
    """
    return next(
        (one for one in map(_load_packaged_profile, list_device_names()) if driver_name in one.driver_names), None
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


@cache
def _load_packaged_profile(name: str) -> DeviceProfile:
    return _load_profile(FOLDER / f"{name}.yaml")


def _load_profile(path: Path) -> DeviceProfile:
    values, lines = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    if not isinstance(values, dict):
        raise ConfigError(f"{path.name} is no device profile. Write one with `llmsys calibrate --output {path}`.")
    try:
        return DeviceProfile.model_validate(values)
    except ValidationError as error:
        origins = {keys: f"{path.name}:{line}" for keys, line in lines.items()}
        raise build_config_error(error, DeviceProfile, ConfigLayer(values, origins), path.name) from None


def _format_unknown_device(name: str) -> str:
    known = list_device_names()
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"{name!r} is not a device with a profile, and no other's numbers are taken for it.{hint} "
        f"Known: {', '.join(known)}. Measure this machine with `llmsys calibrate --output "
        f"{Path(name).stem or 'mine'}.yaml` and give that file."
    )
