"""The fastest layout of a program on a number of devices: axes, micro-batch and recomputation that
nobody named.

Invariants:
- What the command line or the config names is kept.
- The result fits the memory of the device; where nothing does, it is the layout that needs least.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import ConfigError, LayoutError
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.kernel_context import MatmulDtype
from llmsys.estimate.named_layout import (
    NAMES,
    NamedLayout,
    find_layout_violations,
    format_device_mismatch,
    parse_layout,
)
from llmsys.estimate.program_profile import (
    ProgramProfile,
    list_program_names,
    load_own_program,
    load_program_profile,
)
from llmsys.estimate.program_run import ProgramRun, build_program_run, find_schedule_violations
from llmsys.estimate.software_profile import resolve_compile_for_profile, resolve_for_profile
from llmsys.estimate.state_memory import resolve_planned_layout

MICRO_SIZES = (1, 2, 4)
INTERLEAVED = (1, 2, 4)
# Below these lengths no published run divides a sequence over ranks beyond the tensor axis.
MIN_CONTEXT_POSITIONS = 16_384


def plan_program_run(
    config: RunConfig,
    program: str | None,
    layout: str | None,
    *,
    device: DeviceProfile | None = None,
    num_devices: int | None = None,
    matmul_dtype: MatmulDtype | None = None,
    expert_load: float = 1.0,
) -> ProgramRun:
    """Build the run that a command line names.

    Args:
        config: config of a run.
        program: name or file of a profile; None: llmsys.
        layout: axes as `parse_layout` takes them, with `auto` to search the others; None: `layout`
            of the config.
        device: profile of the accelerator; None: none is known.
        num_devices: number of devices; None: that of the layout.
        matmul_dtype: type of the inputs of matmuls in blocks; None: that of the config.
        expert_load: tokens of the fullest rank of experts over the mean.

    Returns:
        The run.

    Raises:
        ConfigError: unknown program, or a layout of another program given to llmsys.
        LayoutError: the layout is illegal, or not of that many devices.
    """
    config = resolve_for_profile(config, device)
    profile = None if program is None else load_program_profile(program)
    if profile is None or profile.is_own:
        if layout is not None:
            raise ConfigError(
                f"--layout {layout} is for other programs. Give llmsys layout.tensor=8 and the "
                "like in the config, or name a program, such as --program megatron. Known: "
                f"{', '.join(list_program_names())}."
            )
        resolved = (
            resolve_planned_layout(config)
            if num_devices is None
            else config.resolve_layout(num_devices)
        )
        compiled = resolve_compile_for_profile(config, device, resolved)
        options: dict[str, Any] = {"matmul_dtype": matmul_dtype, "expert_load": expert_load}
        return ProgramRun(compiled, resolved, profile or load_own_program(compiled), **options)
    if layout is not None and is_searched(layout):
        if device is None or num_devices is None:
            raise ConfigError(
                f"--layout {layout} needs the devices. Add --device NAME and --gpus N."
            )
        return search_program_run(
            config, profile, layout, device, num_devices, matmul_dtype, expert_load
        )
    named = _name_config_layout(config, num_devices) if layout is None else parse_layout(layout)
    if num_devices is not None and named.num_devices != num_devices:
        raise LayoutError(format_device_mismatch(named, num_devices))
    return build_program_run(config, profile, named, device, matmul_dtype, expert_load)


def _name_config_layout(config: RunConfig, num_devices: int | None) -> NamedLayout:
    """Return the layout of a config by its axes; all other devices read different data."""
    layout = config.layout
    fixed = layout.tensor * layout.context * layout.pipeline * layout.replicate
    shard = (
        layout.shard
        if layout.shard != -1
        else max(1, (num_devices or config.launch.processes) // fixed)
    )
    chunks = layout.pipeline_schedule.num_chunks if layout.pipeline > 1 else 1
    return NamedLayout(
        layout.tensor,
        layout.context,
        layout.pipeline,
        layout.expert,
        layout.replicate,
        shard,
        interleave=chunks,
    )


def is_searched(layout: str) -> bool:
    """Return whether a layout asks for a search: `auto`, or axes and `auto` such as
    `tp=4,pp=12,auto`.
    """
    return "auto" in map(str.strip, layout.split(","))


def search_program_run(
    config: RunConfig,
    program: ProgramProfile,
    layout: str,
    device: DeviceProfile,
    num_devices: int,
    matmul_dtype: MatmulDtype | None = None,
    expert_load: float = 1.0,
) -> ProgramRun:
    """Find the fastest run of a program that fits.

    Args:
        config: config of a run; `batch.micro_sequences` and `train.activation_checkpoint` are kept
            where it gives them.
        program: profile of the program.
        layout: axes to keep, and `auto`.
        device: profile of the accelerator.
        num_devices: number of devices.
        matmul_dtype: type of the inputs of matmuls in blocks; None: that of the config.
        expert_load: tokens of the fullest rank of experts over the mean.

    Returns:
        The run with the lowest P50 of a step.

    Raises:
        LayoutError: no layout of that many devices is legal.
    """
    config = resolve_for_profile(config, device)
    words = [word for word in map(str.strip, layout.split(",")) if word and word != "auto"]
    named = parse_layout(",".join(words)) if words else NamedLayout()
    kept = {NAMES[word.partition("=")[0].strip().lower()] for word in words}
    found: list[tuple[float, int, ProgramRun]] = []
    for axes in _iter_layouts(config, program, device, num_devices, named, kept):
        for one in _iter_runs(config, program, axes, device, matmul_dtype):
            run = replace(one, expert_load=expert_load)
            found.append((run.estimate_step(device).seconds.p50, len(found), run))
    if not found:
        raise LayoutError(
            f"No layout of {num_devices} devices is legal for this model and batch with {layout}. "
            "Use another number of devices, or a batch.sequences that the data ranks divide."
        )
    least: tuple[float, ProgramRun] | None = None
    for _, _, run in sorted(found, key=lambda one: one[:2]):
        ledger = run.estimate_memory()
        needed = ledger.peak_bytes + ledger.driver_bytes
        if needed <= device.memory_bytes:
            return run
        if least is None or needed < least[0]:
            least = needed, run
    assert least is not None
    return least[1]


def _iter_layouts(
    config: RunConfig,
    program: ProgramProfile,
    device: DeviceProfile,
    num_devices: int,
    named: NamedLayout,
    kept: set[str],
) -> Iterator[NamedLayout]:
    """Yield the legal layouts of a number of devices that have the named axes."""
    model, length = config.model, config.batch.sequence_length
    tensors = [size for size in list_divisors(num_devices) if size <= min(device.node_devices, 8)]
    # Stages of equal length, as programs cut them, with embedding and head as a block each where
    # blocks do not divide.
    layers = model.num_hidden_layers
    pipelines = [
        size
        for size in list_divisors(num_devices)
        if size <= 64 and 0 in (layers % size, (layers + 2) % size)
    ]
    contexts = (
        [size for size in list_divisors(num_devices) if size <= 16]
        if length > MIN_CONTEXT_POSITIONS
        else [1]
    )
    experts = (
        [1]
        if model.moe is None
        else [size for size in list_divisors(model.moe.num_experts) if 4 <= size <= 64]
    )
    for tensor in [named.tensor] if "tensor" in kept else tensors:
        for pipeline in [named.pipeline] if "pipeline" in kept else pipelines:
            for context in [named.context] if "context" in kept else contexts:
                shard, rest = divmod(num_devices, tensor * pipeline * context * named.replicate)
                if rest or not shard:
                    continue
                for expert in [named.expert] if "expert" in kept else experts:
                    for chunks in _list_chunks(config, pipeline, named, kept):
                        one = NamedLayout(
                            tensor, context, pipeline, expert, named.replicate, shard, chunks
                        )
                        problems = find_layout_violations(config, one, num_devices, with_batch=True)
                        if not any((*problems, *find_schedule_violations(program, one))):
                            yield one


def _list_chunks(config: RunConfig, pipeline: int, named: NamedLayout, kept: set[str]) -> list[int]:
    """Return the numbers of stages on each rank to try."""
    if "interleave" in kept:
        return [named.interleave]
    layers = config.model.num_hidden_layers
    slots = layers if layers % pipeline == 0 else layers + 2
    return [
        1,
        *(
            size
            for size in INTERLEAVED
            if size > 1 and pipeline > 1 and slots % (pipeline * size) == 0
        ),
    ]


def _iter_runs(
    config: RunConfig,
    program: ProgramProfile,
    axes: NamedLayout,
    device: DeviceProfile,
    dtype: MatmulDtype | None,
) -> Iterator[ProgramRun]:
    """Yield the runs in a layout, by micro-batch and recomputation."""
    share = config.batch.sequences_per_step // (axes.replicate * axes.shard)
    wanted = config.batch.micro_sequences
    sizes = (
        [wanted]
        if isinstance(wanted, int) and wanted
        else [one for one in MICRO_SIZES if share % one == 0]
    )
    policies = (
        [config.train.activation_checkpoint]
        if "activation_checkpoint" in config.train.model_fields_set
        else ["none", "selective", "full"]
    )
    run = build_program_run(config, program, replace(axes), device, dtype)
    for size in sizes:
        batch = config.batch.model_copy(update={"micro_sequences": size})
        for policy in policies:
            train = run.config.train.model_copy(update={"activation_checkpoint": policy})
            yield replace(
                run, config=run.config.model_copy(update={"batch": batch, "train": train})
            )
