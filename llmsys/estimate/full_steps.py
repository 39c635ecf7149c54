"""Count the steps of a run with a sequence-length curriculum in steps of full sequences."""

from collections.abc import Callable, Sequence

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.step_time import StepTime, estimate_step_time


def count_full_steps(
    config: RunConfig,
    step: StepTime,
    device: DeviceProfile,
    resolve_layout: Callable[[RunConfig], ParallelLayout],
    documents: Sequence[int],
    expert_load: float,
) -> float:
    """Count the steps of a run in steps of full sequences: those of `batch.length_stages` take less
    time.

    Args:
        config: resolved config of a run.
        step: time of a step of full sequences.
        device: profile of the accelerator.
        resolve_layout: returns the layout of a config.
        documents: lengths of documents in a window; empty for one.
        expert_load: rows of the fullest rank's experts over the mean, as in the time of the step.

    Returns:
        Steps, each counted by its time.
    """
    batch, total, first = config.batch, config.num_steps, 0
    if isinstance(batch.ramp, NoiseRampConfig) and not batch.ramp.doubled_after_steps:
        # The doublings are not known before the run; a small step takes less time by about its
        # share of tokens.
        total = batch.count_tokens_before(total) // batch.tokens_per_step
    counted = 0.0
    for stage in batch.length_stages:
        last = min(total, batch.count_steps_for(stage.until_tokens))
        if last > first:
            parts = batch.sequence_length // stage.sequence_length
            micro = (
                batch.micro_sequences
                if batch.micro_sequences == "auto"
                else batch.micro_sequences * parts
            )
            changes = {
                "sequence_length": stage.sequence_length,
                "length_stages": (),
                "tokens": None,
                "ramp": None,
            }
            changes |= {"sequences": batch.sequences_per_step * parts, "micro_sequences": micro}
            shorter = config.model_copy(update={"batch": batch.model_copy(update=changes)})
            cut = [min(length, stage.sequence_length) for length in documents]
            one = estimate_step_time(
                shorter, resolve_layout(shorter), device, documents=cut, expert_load=expert_load
            )
            counted += (last - first) * one.seconds.p50 / step.seconds.p50
            first = last
    return counted + total - first
