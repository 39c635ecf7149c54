"""Resolve `train.precision: auto` for a device that is described, not at hand.

On a device at hand, llmsys/train/precision.py asks torch.
"""

from llmsys.config.run import RunConfig
from llmsys.config.train import Precision
from llmsys.estimate.device_profile import DeviceProfile, load_device_profile


def select_precision(device: DeviceProfile | None) -> tuple[Precision, str]:
    """Return bf16 where a profile multiplies it faster than fp32, else fp32, with the reason.

    Without a profile it is bf16, since that is what accelerators train in.
    """
    if device is None:
        return "bf16", "no device is given, and accelerators support it natively"
    bf16, fp32 = (device.peak_flops.get(number) for number in ("bf16", "fp32"))
    if bf16 is None:
        return "fp32", f"the profile of {device.name} has no bf16 matmuls"
    if fp32 is not None and bf16 <= fp32:
        return "fp32", f"the profile of {device.name} is no faster in bf16"
    return "bf16", f"the profile of {device.name} supports it natively"


def resolve_for_profile(config: RunConfig, device: DeviceProfile | None = None) -> RunConfig:
    """Resolve `train.precision=auto` by a device profile.

    Args:
        config: resolved config of a run.
        device: profile; None: the one that flops.device names.

    Returns:
        The config with bf16 or fp32 in place of `auto`.

    Raises:
        ConfigError: other settings need another precision, or flops.device names no profile.
    """
    if config.train.precision != "auto":
        return config
    if device is None and config.flops.device is not None:
        device = load_device_profile(config.flops.device)
    return config.resolve_precision(*select_precision(device))


def describe_precision(config: RunConfig, device: DeviceProfile | None = None) -> dict[str, str]:
    """Return {number, reason}: the type an estimate of this config counts with, and why it is that one."""
    if config.train.precision != "auto":
        return {"number": config.train.resolved_precision, "reason": "train.precision names it"}
    if device is None and config.flops.device is not None:
        device = load_device_profile(config.flops.device)
    number, reason = select_precision(device)
    return {"number": number, "reason": f"train.precision=auto: {reason}"}
