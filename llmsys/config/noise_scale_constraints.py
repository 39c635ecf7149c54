"""Rules of the gradient noise scale (`train.noise_scale_every_steps`), and of a batch that grows by
it.

It compares the gradient of the first micro-batch of a step with that of the full step (McCandlish
2018), in bitwise mode that of its first half. A step needs therefore several micro-batches, and the
first gradient must be complete before the next is added.
"""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.train import TrainConfig
from llmsys.errors import ConfigError, Violation

NONE = "or set train.noise_scale_every_steps=0"


def find_noise_scale_violations(
    train: TrainConfig,
    engine: EngineConfig,
    layout: ParallelLayout,
    batch: BatchConfig,
    *,
    windows: bool,
) -> Iterator[Violation]:
    """Yield a violation for every setting that hides the gradient of a single micro-batch.

    Args:
        train: the `train:` section, with noise_scale_every_steps, or 0 for a batch that grows by
            it.
        engine: the `engine:` section.
        layout: the `layout:` section.
        batch: the `batch:` section.
        windows: steps consist of windows of equal length, not of pairs or texts.
    """
    if isinstance(ramp := batch.ramp, NoiseRampConfig):
        yield from _find_ramp_violations(ramp, train.noise_scale_every_steps)
    if not train.noise_scale_every_steps:
        return
    what = "the gradient noise scale needs the gradient of one micro-batch, summed over ranks"
    if engine.kind != "torch" or engine.data_parallel != "fsdp":
        value = (
            engine.kind
            if engine.kind != "torch"
            else f"torch with data_parallel={engine.data_parallel}"
        )
        text = f"{value} reduces over ranks only after the last micro-batch, but {what}. "
        yield Violation("engine.kind", f"{text}Use torch with data_parallel=fsdp, {NONE}.")
    if layout.tensor > 1:
        text = (
            f"{layout.tensor} ranks reduce some gradients only after the last micro-batch, but "
            f"{what}. "
        )
        yield Violation("layout.tensor", f"{text}Use tensor=1, {NONE}.")
    if train.reproducibility == "bitwise" and batch.assignment == "balanced":
        text = (
            "balanced begins a step with its costliest micro-batches, and bitwise measures its "
            "first half. "
        )
        yield Violation("batch.assignment", f"{text}Use sequential, {NONE}.")
    if train.precision == "fp16":
        yield Violation(
            "train.precision",
            f"fp16 unscales gradients only after the last micro-batch, but {what}. Use bf16, "
            f"{NONE}.",
        )
    if not windows:
        text = (
            "pairs and texts are batched in length buckets, which are no random sample of a step. "
        )
        yield Violation("train.noise_scale_every_steps", f"{text}Set it to 0.")
    elif batch.micro_sequences == 0:
        text = (
            "0 makes one micro-batch of a rank's share, but the noise is measured between several. "
        )
        yield Violation(
            "batch.micro_sequences", f"{text}Use a smaller divisor of the rank's share, {NONE}."
        )


def _find_ramp_violations(ramp: NoiseRampConfig, every_steps: int) -> Iterator[Violation]:
    """Yield a violation unless doublings are either measured or given."""
    if not every_steps and not ramp.doubled_after_steps:
        text = (
            "0 measures no noise scale, by which batch.ramp.kind=noise_scale doubles the batch. "
            "Set it to 10"
        )
        yield Violation(
            "train.noise_scale_every_steps", f"{text}, or give batch.ramp.doubled_after_steps."
        )
    elif every_steps and ramp.doubled_after_steps:
        text = (
            f"{list(ramp.doubled_after_steps)} are the doublings of another run, and "
            "train.noise_scale_every_steps="
        )
        text = (
            f"{text}{every_steps} measures for new ones. Omit them, or set "
            "train.noise_scale_every_steps=0."
        )
        yield Violation("batch.ramp.doubled_after_steps", text)


def require_micro_batches(micro_batches: int, batch: BatchConfig) -> str:
    """Check that steps that are measured have more than one micro-batch per rank.

    Args:
        micro_batches: micro-batches per rank in the last step, of a batch that grows by the noise
            in the first.
        batch: the batch section, named in the error message.

    Returns:
        The number of micro-batches as text for the log.

    Raises:
        ConfigError: there is one micro-batch.
    """
    if micro_batches > 1:
        return f"{micro_batches} micro-batches"
    raise ConfigError(
        "train.noise_scale_every_steps compares micro-batches, but "
        f"batch.micro_sequences={batch.micro_sequences} gives each rank only one. Use a smaller "
        f"batch.micro_sequences or fewer processes, {NONE}."
    )
