"""Check a named layout: ours, or a published one with a pipeline, as another program runs it.

What a legal layout takes: whether its fullest rank fits, and the time of a step.
"""

from collections.abc import Iterator
from dataclasses import replace

from llmsys.config.run import RunConfig
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.memory_residual import format_fit_probability, get_memory_residual
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.named_layout import NamedLayout
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.plan.json_output import LayoutCheckOutput
from llmsys.estimate.program_profile import ProgramProfile, load_own_program, load_program_profile
from llmsys.estimate.program_run import ProgramRun, build_program_run
from llmsys.estimate.software_profile import OURS, resolve_compile_for_profile, resolve_for_profile

# The program of a pipeline where none is named: most published ones are its.
PIPELINED_PROGRAM = "megatron"


def iter_remarks(config: RunConfig, named: NamedLayout, *, has_batch: bool = True) -> Iterator[str]:
    """Yield remarks on a legal layout.

    Args:
        config: resolved config of a run.
        named: layout that `parse_layout` returned.
        has_batch: somebody gave a batch.

    Yields:
        One sentence per remark.
    """
    if not has_batch:
        yield (
            "its memory and time depend on a batch: give batch.sequence_length and batch.sequences"
        )
    if named.pipeline > 1:
        yield (
            f"pipeline={named.pipeline} is estimated as other trainers run it; layout.pipeline as "
            "llmsys train does"
        )
        if config.model.num_hidden_layers % named.pipeline:
            yield f"{config.model.num_hidden_layers} blocks make stages of unequal length"


def estimate_layout_fit(
    config: RunConfig,
    named: NamedLayout,
    cluster: ClusterCosts,
    program: ProgramProfile | None = None,
) -> LayoutCheckOutput:
    """Estimate memory and step time of a legal layout.

    Args:
        config: resolved config of a run.
        named: layout that `parse_layout` returned.
        cluster: devices and their profile.
        program: who runs it; None: megatron for a pipeline, else llmsys.

    Returns:
        The object that `llmsys plan --check --json` prints.
    """
    device = cluster.load_device()
    if program is None:
        resolved = resolve_compile_for_profile(
            resolve_for_profile(config, device), device, named.layout
        )
        program = (
            load_program_profile(PIPELINED_PROGRAM)
            if named.pipeline > 1
            else load_own_program(resolved)
        )
    run = build_program_run(config, program, named, device, expert_load=cluster.expert_load)
    ledger = run.estimate_memory()
    found = ledger.compute_fit_result(int(device.memory_bytes))
    residual = get_memory_residual(named.num_devices, program)
    interval = residual.compute_interval(ledger)
    probability = residual.compute_fit_probability(ledger, device.memory_bytes)
    step = run.estimate_step(device)
    seconds = step.seconds
    return LayoutCheckOutput(
        legal=True,
        devices=named.num_devices,
        problems=[],
        remarks=list(iter_remarks(config, named)),
        program=program.name,
        fits=found.fits,
        peak_bytes=ledger.peak_bytes + ledger.driver_bytes,
        needed_bytes=interval,
        fit_probability=probability,
        memory=f"{found.text} It {format_fit_probability(probability)}: "
        f"{interval.p10 / GIB:.1f} to {interval.p90 / GIB:.1f} GiB from P10 to P90.",
        assumed=list(_iter_assumptions(run)),
        step_seconds=seconds,
        time=(
            f"under {program.name} a step takes {seconds.p50:.3g} s ({seconds.p10:.3g} to "
            f"{seconds.p90:.3g}), {step.tokens_per_second_per_device:,.0f} tokens/s/device, "
            f"utilisation {step.mfu:.1%}"
        ),
    )


def _iter_assumptions(run: ProgramRun) -> Iterator[str]:
    """Yield what the memory of a program rests on and no source gives, each with the memory
    without it.
    """
    profile = run.memory_profile
    for name, reason in run.program.assumed.items():
        value, other = getattr(profile, name), getattr(OURS, name)
        if value != other:
            changed = estimate_peak_memory(
                run.config, run.layout, system=replace(profile, **{name: other})
            )
            size = (changed.peak_bytes + changed.driver_bytes) / GIB
            yield (
                f"assumed: memory.{name}={value}, because {reason}; with {other} it is {size:.1f} "
                "GiB"
            )
