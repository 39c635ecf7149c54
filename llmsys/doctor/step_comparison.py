"""Compare measured steps with what `llmsys dryrun` and `llmsys estimate` say about the same
words.
"""

from llmsys.doctor.check_row import CheckRow, build_row
from llmsys.doctor.step_check import MODELS, StepMeasurement, load_step_config
from llmsys.dryrun.dry_run import run_dry_run
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.errors import LlmsysError
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.step_time import estimate_step_time
from llmsys.train.step_metrics import build_flops_convention

# Limits of the difference between measured memory and the dry run's; the larger one counts.
MEMORY_SHARE, MEMORY_BYTES = 0.1, 64 << 20
# A step that takes this many times the estimate's P90 fails.
SLOW_FACTOR = 2.0


def build_speed_row(
    measured: StepMeasurement, ranks: int, profile: DeviceProfile | None
) -> CheckRow:
    """Compare the time of a step with the estimate.

    Args:
        measured: from `measure_steps`.
        ranks: number of ranks.
        profile: profile of the device; None: unknown.

    Returns:
        A row; it fails beyond `SLOW_FACTOR` times the P90.
    """
    name, config = MODELS[measured.model].name, load_step_config(measured.model, measured.overrides)
    speed = config.batch.tokens_per_step / measured.seconds
    size = (
        f"{count_parameters(config.model).total / 1e6:,.3g} M parameters, "
        f"{config.train.resolved_precision}"
    )
    text = f"{size}: {1e3 * measured.seconds:,.1f} ms a step, {speed:,.0f} tokens/s"
    if profile is None:
        hint = "llmsys calibrate --output mine.yaml, then --device mine.yaml"
        return build_row("speed", name, True, f"{text}; no device profile to compare with: {hint}")
    try:
        estimated = estimate_step_time(config, config.resolve_layout(ranks), profile)
    except LlmsysError as error:
        return build_row("speed", name, True, f"{text}; not compared: {error}")
    interval = estimated.seconds
    mfu = build_flops_convention(config, profile, ranks).compute_utilisation(speed)
    shown = "unknown" if mfu is None else f"{mfu:.1%}"
    low, middle, high = (f"{1e3 * one:,.1f}" for one in (interval.p10, interval.p50, interval.p90))
    expected = f"{middle} ({low} to {high}) ms, {estimated.mfu:.1%}"
    is_good = measured.seconds <= SLOW_FACTOR * interval.p90
    limit = "" if is_good else f"; more than {SLOW_FACTOR:g} times the P90"
    return build_row(
        "speed",
        name,
        is_good,
        f"{text}, MFU {shown}; estimate {expected}{limit}",
        mfu=mfu,
        estimate=estimated.to_output().model_dump(),
        ratio=measured.seconds / interval.p50,
    )


def build_memory_row(measured: StepMeasurement, ranks: int, profile: str | None) -> CheckRow:
    """Compare the memory of a step with a dry run of the same words, which takes a process of its
    own.

    Args:
        measured: from `measure_steps`.
        ranks: number of ranks.
        profile: name or file of the device's profile; None: unknown.

    Returns:
        A row; not run on a CPU, whose allocator counts nothing, and without a profile.
    """
    name = MODELS[measured.model].name
    if not measured.peak_bytes:
        return CheckRow("memory", name, "not run", "a CPU does not count what tensors hold")
    if profile is None:
        return CheckRow(
            "memory", name, "not run", "this device has no profile to dry-run on: use --device"
        )
    request = DryRunRequest(
        MODELS[measured.model].config, measured.overrides, 1, ranks, rank=0, device=profile
    )
    try:
        phases = run_dry_run(request)["memory"]["phases"]
    except LlmsysError as error:
        return build_row("memory", name, False, f"the dry run failed: {str(error).splitlines()[0]}")
    expected = max(
        int(phase["peak_bytes"]) for phase in phases if phase["name"].startswith("step 2")
    )
    apart = measured.peak_bytes - expected
    is_good = abs(apart) <= max(MEMORY_SHARE * expected, MEMORY_BYTES)
    text = (
        f"{measured.peak_bytes / GIB:.2f} GiB, dry run {expected / GIB:.2f} GiB "
        f"({apart / expected:+.1%})"
    )
    return build_row(
        "memory", name, is_good, text, measured_bytes=measured.peak_bytes, dry_run_bytes=expected
    )
