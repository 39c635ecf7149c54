"""Where the gradient noise scale can be measured (`train.noise_scale_every_steps`).

It compares the gradient of a step's first micro-batch with that of the whole step, so there must be a first one, and
its gradient must be whole before the next is added.
"""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.train import TrainConfig
from llmsys.config.violation import Violation
from llmsys.errors import ConfigError

NONE = "or set train.noise_scale_every_steps=0"


def find_noise_scale_violations(
    train: TrainConfig, engine: EngineConfig, layout: ParallelLayout, batch: BatchConfig, *, windows: bool
) -> Iterator[Violation]:
    """What hides the gradient of a single micro-batch; `windows` where steps are cut into windows of one length."""
    if not train.noise_scale_every_steps:
        return
    what = "the gradient noise scale needs the gradient of one micro-batch, summed over ranks"
    if engine.kind != "torch" or engine.data_parallel != "fsdp":
        value = engine.kind if engine.kind != "torch" else f"torch with data_parallel={engine.data_parallel}"
        text = f"{value} sums over ranks after the last micro-batch only, and {what}. "
        yield Violation("engine.kind", f"{text}Use torch with data_parallel=fsdp, {NONE}.")
    if layout.tensor > 1:
        text = f"{layout.tensor} ranks finish some gradients after the last micro-batch, and {what}. "
        yield Violation("layout.tensor", f"{text}Use tensor=1, {NONE}.")
    if train.reproducibility == "bitwise":
        yield Violation("train.reproducibility", f"bitwise sums micro-batches in a tree, and {what}. Use fast, {NONE}.")
    if train.precision == "fp16":
        yield Violation("train.precision", f"fp16 scales the gradient until it is whole, and {what}. Use bf16, {NONE}.")
    if not windows:
        text = "pairs and texts come in groups of similar length, and a group says little about a step. "
        yield Violation("train.noise_scale_every_steps", f"{text}Set it to 0.")
    elif batch.micro_sequences == 0:
        text = "0 puts a rank's whole share into one micro-batch, and the noise is what several differ by. "
        yield Violation("batch.micro_sequences", f"{text}Use a divisor of the share, {NONE}.")


def require_micro_batches(micro_batches: int, batch: BatchConfig) -> str:
    """ConfigError where even the last step has one micro-batch on a rank."""
    if micro_batches > 1:
        return f"{micro_batches} micro-batches"
    raise ConfigError(
        f"train.noise_scale_every_steps compares micro-batches, and batch.micro_sequences={batch.micro_sequences} "
        f"leaves each rank one. Use a smaller batch.micro_sequences or fewer processes, {NONE}."
    )
