"""What a legal layout takes: whether its fullest rank fits, and the time of a step."""

from dataclasses import replace
from typing import Any

from llmsys.config.engine import DeepSpeedEngineConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.cluster import ClusterCosts
from llmsys.estimate.device import load_device_profile
from llmsys.estimate.memory_peak import estimate_peak_memory
from llmsys.estimate.plan.check import NamedLayout
from llmsys.estimate.precision import resolve_for_profile
from llmsys.estimate.software import COMPILED, build_software_profile
from llmsys.estimate.system import OURS, MemoryProfile
from llmsys.estimate.time import estimate_step_time

PIPELINED = MemoryProfile(
    evaluation="none", loss="fused", head="columns", masks="none", selective="attention", gathered="again"
)


def estimate_layout_fit(config: RunConfig, named: NamedLayout, cluster: ClusterCosts) -> dict[str, Any]:
    """Keys: fits, memory (a sentence), time (a sentence), step_seconds, peak_bytes.

    A pipeline is that of another trainer: state split as ZeRO-1 splits it, since every stage runs many times in a step,
    and fused kernels.
    """
    device = load_device_profile(cluster.device)
    config = resolve_for_profile(config, device)
    system, software = OURS, build_software_profile(config)
    if named.pipeline > 1:
        config = config.model_copy(update={"engine": DeepSpeedEngineConfig(zero_stage=1)})
        system, software = replace(PIPELINED, pipeline=named.pipeline), COMPILED
    ledger = estimate_peak_memory(config, named.layout, system=system)
    found = ledger.compute_fit_result(int(device.memory_bytes))
    step = estimate_step_time(config, named.layout, device, pipeline=named.pipeline, software=software)
    seconds = step.seconds
    return {
        "fits": found.fits,
        "peak_bytes": ledger.peak_bytes + ledger.driver_bytes,
        "memory": found.text,
        "step_seconds": seconds.to_dict(),
        "time": (
            f"a step takes {seconds.p50:.3g} s ({seconds.p10:.3g} to {seconds.p90:.3g}), "
            f"{step.tokens_per_second_per_device:,.0f} tokens/s/device, utilisation {step.mfu:.1%}"
        ),
    }
