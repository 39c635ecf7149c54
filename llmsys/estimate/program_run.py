"""A run as a program runs it on devices: the config under its engine, the layout of a stage, and
the stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import LayoutError
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.kernel_context import MatmulDtype
from llmsys.estimate.memory_timeline import MemoryTimeline
from llmsys.estimate.named_layout import NamedLayout, find_layout_violations
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.program_profile import ProgramProfile
from llmsys.estimate.software_profile import (
    MemoryProfile,
    resolve_compile_for_profile,
    resolve_for_profile,
)
from llmsys.estimate.step_time import StepTime, estimate_step_time


@dataclass(frozen=True)
class ProgramRun:
    """A run of a program. Build it with `build_program_run`.

    Attributes:
        config: the run under the engine of the program.
        layout: axes of one stage; of llmsys all axes.
        program: its profile.
        pipeline: stages of the program, 1 for llmsys, whose `layout` has them.
        interleave: chunks of the model on each rank of that pipeline.
        matmul_dtype: type of the inputs of matmuls in blocks; None: that of the config.
        expert_load: tokens of the fullest rank of experts over the mean.
    """

    config: RunConfig
    layout: ParallelLayout
    program: ProgramProfile
    pipeline: int = 1
    interleave: int = 1
    matmul_dtype: MatmulDtype | None = None
    expert_load: float = 1.0

    @property
    def num_ranks(self) -> int:
        """Number of devices."""
        return self.layout.world_size * self.pipeline

    @property
    def memory_profile(self) -> MemoryProfile:
        """The program's use of memory under this pipeline."""
        profile = self.program.build_memory_profile(self.pipeline, self.interleave)
        return replace(profile, expert_load=self.expert_load)

    def format_layout(self) -> str:
        """For tables: every axis that is more than 1, the micro-batch and the recomputation."""
        layout = self.layout
        axes = {
            "tp": layout.tensor,
            "cp": layout.context,
            "pp": self.pipeline,
            "vp": self.interleave,
        }
        axes |= {"ep": layout.expert, "dp": layout.data_parallel_size}
        sizes = ",".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "dp=1"
        train, batch = self.config.train, self.config.batch
        return f"{sizes} micro={batch.micro_sequences} {train.activation_checkpoint}"

    def estimate_memory(self) -> MemoryTimeline:
        """Return the timeline of the fullest rank."""
        return estimate_peak_memory(self.config, self.layout, system=self.memory_profile)

    def estimate_step(self, device: DeviceProfile, documents: tuple[int, ...] = ()) -> StepTime:
        """Estimate the time of a step.

        Args:
            device: profile of the accelerator.
            documents: lengths in tokens of the documents packed into a window; empty: one document.
        """
        return estimate_step_time(
            self.config,
            self.layout,
            device,
            pipeline=self.pipeline,
            interleave=self.interleave,
            program=self.program,
            matmul_dtype=self.matmul_dtype,
            documents=documents,
            expert_load=self.expert_load,
        )


def build_program_run(
    config: RunConfig,
    program: ProgramProfile,
    named: NamedLayout,
    device: DeviceProfile | None = None,
    matmul_dtype: MatmulDtype | None = None,
    expert_load: float = 1.0,
) -> ProgramRun:
    """Build the run of a program in a named layout.

    Args:
        config: config of a run.
        program: profile of the program.
        named: layout that `parse_layout` returned.
        device: profile that resolves train.precision and train.compile; None: the config's.
        matmul_dtype: type of the inputs of matmuls in blocks; None: that of the config.
        expert_load: tokens of the fullest rank of experts over the mean.

    Returns:
        The run. Under a pipeline a micro-batch has one sequence where `batch.micro_sequences` is 0.

    Raises:
        LayoutError: the layout is illegal for the model or batch.
    """
    config = resolve_for_profile(config, device)
    if named.pipeline > 1 and not config.batch.micro_sequences:
        config = config.model_copy(
            update={"batch": config.batch.model_copy(update={"micro_sequences": 1})}
        )
    problems = [
        *find_layout_violations(config, named, None, with_batch=True),
        *_iter_micro_violations(config, named),
        *find_schedule_violations(program, named),
    ]
    if problems:
        raise LayoutError(" ".join(problems))
    layout = named.build_layout(config.layout)
    compiled = "block" if program.time.compiles else "none"
    train = config.train.model_copy(update={"compile": compiled})
    if program.is_own:
        config = resolve_compile_for_profile(config, device, layout)
        train = config.train
    # Not validated: an engine of another program may have layouts that ours has not.
    engine = program.select_engine(config, named.pipeline)
    changed = config.model_copy(update={"engine": engine, "layout": layout, "train": train})
    return ProgramRun(
        changed, layout, program, named.pipeline, named.interleave, matmul_dtype, expert_load
    )


def _iter_micro_violations(config: RunConfig, named: NamedLayout) -> Iterator[str]:
    """Yield the violations of a micro-batch that does not divide the sequences of a rank."""
    wanted, ranks = config.batch.micro_sequences, named.replicate * named.shard
    share, rest = divmod(config.batch.sequences_per_step, ranks)
    if isinstance(wanted, int) and wanted and not rest and share % wanted:
        legal = [size for size in list_divisors(share) if size < wanted]
        yield (
            f"batch.micro_sequences={wanted} does not divide the {share} sequences of a rank. Use "
            f"{legal[-1]}."
        )


def find_schedule_violations(program: ProgramProfile, named: NamedLayout) -> Iterator[str]:
    """Yield the violations of a bidirectional pipeline, which has a stage of each half on every
    rank.

    Args:
        program: profile of the program.
        named: layout that `parse_layout` returned.

    Returns:
        An iterator over sentences.
    """
    if (
        named.pipeline == 1
        or program.build_memory_profile(named.pipeline).schedule != "bidirectional"
    ):
        return
    if named.pipeline % 2:
        pairs = f"pipeline={named.pipeline} cannot be divided into pairs of ranks"
        yield f"{pairs}, as {program.name} needs. Use an even number."
    if named.interleave > 1:
        yield (
            f"{program.name} has two stages on each rank, and no interleave={named.interleave}. "
            "Use interleave=1."
        )
