"""Everything the estimate knows about a config, as the object that `llmsys estimate --json` prints;
`summary_table.py` formats it.

Time, money and energy depend on a device and are unknown without a profile of one, and are then
left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.data_parallel_choice import (
    is_data_parallel_open,
    resolve_data_parallel_for_profile,
)
from llmsys.estimate.flops import CONVENTIONS, Convention, FlopsCount, count_flops
from llmsys.estimate.json_output import (
    BatchSize,
    ConventionFlops,
    EstimateOutput,
    RankMemory,
    RunSize,
    StepFlops,
    TensorCount,
)
from llmsys.estimate.memory_residual import get_memory_residual
from llmsys.estimate.model_tensors import count_parameters, list_model_tensors
from llmsys.estimate.peak_memory import estimate_activation_bytes, estimate_peak_memory
from llmsys.estimate.rank_parameters import PipelineStage, list_pipeline_stages
from llmsys.estimate.software_profile import (
    OURS,
    describe_precision,
    find_named_profile,
    resolve_compile_for_profile,
    resolve_for_profile,
)
from llmsys.estimate.state_memory import compute_state_bytes, resolve_planned_layout

if TYPE_CHECKING:
    from llmsys.estimate.device_profile import DeviceProfile
    from llmsys.estimate.program_run import ProgramRun

NO_DEVICE = "needs a device: --device NAME, or a file written by llmsys calibrate"
CONTEXTS = (512, 2048, 8192, 32768, 131072)


def estimate_run(
    config: RunConfig,
    *,
    model_only: bool = False,
    has_budget: bool = True,
    documents: Sequence[int] = (),
    device: "DeviceProfile | None" = None,
    planned: "ProgramRun | None" = None,
    expert_load: float = 1.0,
    layout: ParallelLayout | None = None,
) -> EstimateOutput:
    """Estimate parameters, operations, memory and budget of a run.

    Bytes are per rank. For a bare model there is no run and no memory: both are None.
    `device` resolves train.precision=auto and train.compile=auto.

    Args:
        config: resolved config of a run.
        model_only: the config is a bare model, which has no run and no memory.
        has_budget: the config says how many tokens the run has.
        documents: lengths in tokens of the documents packed into a window, repeated until it is
            full.
        device: profile that resolves both; None: the one that flops.device names.
        planned: the run of another program; None: of llmsys.
        expert_load: tokens of the fullest rank of experts over the mean; `planned` has its own.
        layout: resolved layout of the run; None: on as many devices as the config starts processes.

    Returns:
        The object that `llmsys estimate --json` prints, without time, money and energy, which
        `add_costs` adds.
    """
    precision = describe_precision(config, device)
    config = resolve_compile_for_profile(resolve_for_profile(config, device), device)
    if not model_only and is_data_parallel_open(config):
        config = resolve_data_parallel_for_profile(
            config,
            layout or resolve_planned_layout(config),
            device or find_named_profile(config),
        )
    return EstimateOutput(
        parameters=count_parameters(config.model),
        batch=_build_batch_size(config, documents),
        flops=_build_step_flops(config, documents),
        memory=None
        if model_only
        else _build_rank_memory(config, planned, expert_load, layout, device),
        run=_build_run_size(config, documents) if has_budget and not model_only else None,
        precision=precision,
        unknown=dict.fromkeys(("time", "money", "energy"), NO_DEVICE),
    )


def list_tensor_counts(config: RunConfig) -> list[TensorCount]:
    """List the parameter tensors of a run, equal ones of several blocks together.

    Args:
        config: resolved config of a run.

    Returns:
        One entry for each row; the counts sum to the total.
    """
    return build_tensor_counts(list_model_tensors(config.model))


def build_tensor_counts(rows: Iterable[ParameterTensor]) -> list[TensorCount]:
    """Return parameter tensors as `--explain --json` prints them.

    Args:
        rows: tensors of a model, equal ones of several blocks together.

    Returns:
        One entry for each row.
    """
    return [
        TensorCount(
            name=row.display_name,
            shape=row.shape,
            copies=row.num_copies,
            component=row.component,
            count=row.num_elements,
        )
        for row in rows
    ]


def _build_batch_size(config: RunConfig, documents: Sequence[int]) -> BatchSize:
    source, length = config.sequence_lengths
    return BatchSize(
        sequence_length=source,
        target_length=length if config.model.family == "encoder_decoder" else None,
        sequences=config.batch.sequences_per_step,
        tokens=config.batch.sequences_per_step * length,
        documents=list(documents) or None,
    )


def _count_step_flops(
    config: RunConfig, convention: Convention, documents: Sequence[int]
) -> FlopsCount:
    source, length = config.sequence_lengths
    sequences = config.batch.sequences_per_step
    again = config.train.activation_checkpoint
    return count_flops(
        config.model,
        source,
        sequences,
        convention,
        target_length=length,
        documents=documents,
        recompute=again,
    )


def _build_step_flops(config: RunConfig, documents: Sequence[int]) -> StepFlops:
    counts = {name: _count_step_flops(config, name, documents) for name in CONVENTIONS}
    every = {
        name: ConventionFlops(
            forward=one.forward,
            forward_backward=one.forward_backward,
            forward_backward_per_token=one.flops_per_token,
            attention_share=one.attention_share,
        )
        for name, one in counts.items()
    }
    chosen = config.flops.convention
    shares = {
        str(s): count_flops(config.model, s, 1, chosen, documents=documents).attention_share
        for s in CONTEXTS
    }
    return StepFlops(
        convention=chosen,
        conventions=every,
        attention_share_by_length=shares,
        **dict(every[chosen]),
    )


def _build_rank_memory(
    config: RunConfig,
    planned: "ProgramRun | None",
    expert_load: float,
    named: ParallelLayout | None,
    device: "DeviceProfile | None",
) -> RankMemory:
    layout = (named or resolve_planned_layout(config)) if planned is None else planned.layout
    stages: Sequence[PipelineStage] = ()
    if planned is not None:
        config = planned.config
        stages = (
            list_pipeline_stages(config.model, planned.memory_profile)
            if planned.pipeline > 1
            else ()
        )
    if layout.pipeline > 1:
        from llmsys.estimate.pipeline_stages import list_rank_stages

        stages = list_rank_stages(config.model, layout, config.batch.sequence_length, 1)
    # The rank that has the most parameters.
    found = [list(stage.iter_parameters(config.model)) for stage in stages]
    rows = (
        max(found, key=lambda tensors: sum(row.num_elements for row in tensors)) if found else None
    )
    system = replace(OURS, expert_load=expert_load) if planned is None else planned.memory_profile
    state = compute_state_bytes(config, layout, rows, system)
    activations = estimate_activation_bytes(config, layout, system)
    pipeline = {} if planned is None or planned.pipeline == 1 else {"pipeline": planned.pipeline}
    memory = estimate_peak_memory(config, layout, system=system)
    ranks = layout.world_size if planned is None else planned.num_ranks
    residual = get_memory_residual(ranks, None if planned is None else planned.program)
    fit: dict[str, Any] = {}
    if device is not None:
        fit = {
            "capacity_bytes": int(device.memory_bytes),
            "fit_probability": residual.compute_fit_probability(memory, device.memory_bytes),
        }
    return RankMemory(
        ranks=ranks,
        layout=layout.to_settings() | pipeline,
        engine=config.engine.model_dump(),
        state_bytes={**asdict(state), "total": state.total},
        activation_bytes_estimated={**asdict(activations), "total": activations.total},
        needed_bytes=residual.compute_interval(memory),
        **fit,
        **dict(memory.to_output()),
    )


def _build_run_size(config: RunConfig, documents: Sequence[int]) -> RunSize:
    step = _count_step_flops(config, config.flops.convention, documents)
    tokens = config.batch.count_tokens_before(config.num_steps)
    return RunSize(
        tokens=tokens,
        steps=config.num_steps,
        flops=step.forward_backward * tokens // config.batch.tokens_per_step,
        tokens_per_parameter=tokens / count_parameters(config.model).active.all,
    )
