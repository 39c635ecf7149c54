"""Resolve `train.precision: auto` and `train.compile: auto` for the devices of this run.

The dtype is the one that the devices multiply natively. Reads the processor's flags, oneDNN's
environment variables and the run's checkpoints. Nothing is measured for the decision, so equal
machines decide alike.

Invariants:
- A run folder with a checkpoint keeps the dtype that the checkpoint was trained in.
- All ranks get one dtype: bf16 only where every rank's device supports it.
"""

import os
import platform
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmsys.config.run import RunConfig
from llmsys.config.train import Precision
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.parallel.process_group import (
    all_gather_object,
    get_local_device,
    get_rank,
    run_on_rank_zero,
)
from llmsys.train.checkpoint_record import read_record

log = get_logger(__name__)

DTYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html: these have no
# bfloat16 products.
ISA_WITHOUT_BF16 = {
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
}
CPUINFO = Path("/proc/cpuinfo")
# fp16 on a CPU that takes this many times as long as fp32 logs a warning.
SLOW_FACTOR = 2.0
MATMUL_SIZE = 192  # 20 ms at the 0.7 GFLOP/s of bfloat16 on avx2


class NativeSupport(NamedTuple):
    """The verdict on native bfloat16 of a device, and the reason in a few words."""

    is_native: bool
    reason: str


def find_bf16_support(device: torch.device) -> NativeSupport:
    """Detect whether torch multiplies bfloat16 on `device` with native instructions.

    Args:
        device: device of this rank.

    Returns:
        The verdict with its reason.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        if torch.version.hip is not None:
            # ROCm numbers compute capabilities differently.
            return NativeSupport(torch.cuda.is_bf16_supported(including_emulation=False), name)
        # Ampere is the first generation that multiplies bfloat16.
        return NativeSupport(major >= 8, name)
    if device.type != "cpu":
        return NativeSupport(False, f"bfloat16 is untested on {device.type}")
    return _find_processor_support()


def _find_processor_support() -> NativeSupport:
    machine = platform.machine().lower()
    if sys.platform != "linux":
        return NativeSupport(
            False, f"torch has no bfloat16 matmuls on {platform.system()} processors"
        )
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return NativeSupport(False, "this torch build has no oneDNN")
    if machine in ("x86_64", "amd64"):
        found = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        if not found:
            return NativeSupport(False, "the processor has neither avx512_bf16 nor AMX")
    elif machine in ("aarch64", "arm64"):
        if "bf16" not in _read_processor_flags():
            return NativeSupport(False, "the processor lacks the bf16 feature")
    else:
        return NativeSupport(False, f"bfloat16 is untested on {machine}")
    for variable in ISA_VARIABLES:
        if os.environ.get(variable, "").upper() in ISA_WITHOUT_BF16:
            return NativeSupport(
                False, f"{variable}={os.environ[variable]} disables its bfloat16 instructions"
            )
    return NativeSupport(True, "the processor supports it natively")


def _read_processor_flags() -> set[str]:
    """Return the flags that Linux lists for the first processor; empty where it lists none."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    found = (
        line.partition(":")[2].split()
        for line in lines
        if line.lower().startswith(("features", "flags"))
    )
    return set(next(found, []))


def find_recorded_precision(run_folder: Path) -> Precision | None:
    """Find the dtype that a run's newest readable checkpoint was trained in.

    Args:
        run_folder: folder of the run.

    Returns:
        The precision, or None without such a checkpoint.
    """
    for checkpoint in sorted(run_folder.glob("checkpoints/step-*"), reverse=True):
        try:
            found = read_record(checkpoint)["run"].get("train", {}).get("precision")
        except (CheckpointError, AttributeError):
            continue
        if found in DTYPES:
            return found  # type: ignore[no-any-return]
    return None


def resolve_precision(config: RunConfig) -> RunConfig:
    """Resolve the precision of all ranks and log the reason. Collective.

    Args:
        config: the config of the run.

    Returns:
        The config with one dtype instead of `auto`.

    Raises:
        ConfigError: other settings need another dtype.
    """
    device = get_local_device()
    own = find_bf16_support(device)
    # False sorts before True: one rank without support decides for all.
    worst = min(all_gather_object((own.is_native, get_rank(), own.reason)))
    support = NativeSupport(worst[0], worst[2])

    def decide() -> Precision:
        asked = config.train.precision
        precision, why = (
            (asked, "") if asked != "auto" else select_precision(config.run.folder, support)
        )
        resolved = config.resolve_precision(precision, why).train.resolved_precision
        if why:
            log.info("train.precision=auto selects %s: %s", resolved, why)
        if warning := describe_slowness(resolved, device, own, kept=asked == "auto"):
            log.warning("%s", warning)
        return resolved

    return config.resolve_precision(run_on_rank_zero(decide))


def resolve_compile(config: RunConfig) -> RunConfig:
    """Resolve `train.compile=auto` for all ranks and log the choice. Collective.

    Args:
        config: the config of the run.

    Returns:
        The config with `block` or `none` instead of `auto`: block only where every rank can
        compile for its device.
    """
    if config.train.compile != "auto":
        return config
    # False sorts before True: one rank without Triton decides for all.
    has_triton = min(
        all_gather_object(get_local_device().type == "cuda" and find_spec("triton") is not None)
    )
    config = config.resolve_compile(has_triton)
    log.info("train.compile=auto selects %s", config.train.compile)
    return config


def choose_native_precision(device: torch.device) -> Precision:
    """Return what `train.precision: auto` becomes for a new run on a device.

    Args:
        device: device of this rank.

    Returns:
        bf16 where the device multiplies it natively, else fp32.
    """
    return "bf16" if find_bf16_support(device).is_native else "fp32"


def select_precision(run_folder: Path, support: NativeSupport) -> tuple[Precision, str]:
    """Choose the dtype of `auto` for a run folder on devices with this support.

    Args:
        run_folder: folder of the run; a run keeps the type of its checkpoints.
        support: whether the devices multiply bfloat16 natively.

    Returns:
        The precision, and the reason.
    """
    own: Precision = "bf16" if support.is_native else "fp32"
    recorded = find_recorded_precision(run_folder)
    if recorded is None:
        return own, support.reason
    if recorded == own:
        return recorded, f"{run_folder} was trained in it, and {support.reason}"
    return (
        recorded,
        f"{run_folder} was trained in it, and a run keeps its dtype; a new run would use {own} "
        "here",
    )


def set_matmul_numerics() -> None:
    """Let float32 matmuls multiply float32, and half-precision ones add in float32.

    TF32 rounds inputs to 10 bits, and the router is in float32 so that rounding does not choose
    another expert. Sums in 16 bits would round each partial sum of a matmul that is split along the
    summed dim.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def get_matmul_numerics() -> dict[str, Any]:
    """Return the settings of torch that matmuls round by, for the record of a run."""
    matmul = torch.backends.cuda.matmul
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "bf16_reduced_precision_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
        "fp16_reduced_precision_sums": bool(matmul.allow_fp16_reduced_precision_reduction),
    }


def describe_slowness(
    precision: Precision, device: torch.device, support: NativeSupport, *, kept: bool
) -> str:
    """Describe how slow a 16-bit dtype is on this device.

    Args:
        precision: The precision of the run.
        device: Device of this rank.
        support: What the device says about bfloat16.
        kept: The precision comes from the checkpoint that is resumed, so it cannot change.

    Returns:
        A warning with the measured factor and the next step; empty where the dtype is not slow.
    """
    if precision == "fp32" or (precision == "bf16" and support.is_native) or device.type != "cpu":
        return ""
    factor = measure_slowdown(DTYPES[precision])
    if factor < SLOW_FACTOR and precision == "fp16":
        return ""
    reason = f" ({support.reason})" if precision == "bf16" else ""
    remedy = "Use train.precision=auto or fp32."
    if kept:
        remedy = "To continue in fp32, start a new run.folder with train.init_from set to this run."
    return (
        f"train.precision={precision} is slow on this device{reason}: a matmul of {MATMUL_SIZE} x "
        f"{MATMUL_SIZE} takes {factor:.3g} times as long as in fp32. {remedy}"
    )


def measure_slowdown(dtype: torch.dtype) -> float:
    """Measure a small CPU matmul in a dtype against one in float32.

    Args:
        dtype: The dtype.

    Returns:
        Its time over that in float32. Takes about 50 ms where it is slow.
    """
    seconds = []
    for measured in (torch.float32, dtype):
        a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=measured)
        a @ a  # the first matmul compiles its kernel
        began = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - began)
    return seconds[1] / seconds[0]
