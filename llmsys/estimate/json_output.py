"""Types of the object that `llmsys estimate --json` prints.

The documentation has a table and a JSON Schema (`tools/docs/json_reference.py`).

Invariants:
- Every key that this command prints is a field here, and no other
  (tests/llmsys/estimate/test_json_output.py). A field with a default is printed only if it was set.
- Bytes, FLOPs and seconds are plain numbers in these units. What is not known exactly has P10, P50
  and P90.
"""

from typing import Any

from pydantic import Field

from llmsys.config.section import ResultSection
from llmsys.estimate.model_tensors import ParameterCounts
from llmsys.estimate.percentile_interval import PercentileInterval
from llmsys.estimate.serving_output import FinetuneOutput
from llmsys.estimate.software_profile import PrecisionChoice


class TensorCount(ResultSection):
    """One parameter tensor, or the same tensor of several blocks."""

    name: str = Field(description="Its name in a checkpoint; `{i}` is the number of a block.")
    shape: tuple[int, ...] = Field(description="Its shape.")
    copies: int = Field(description="Blocks that have it.")
    component: str = Field(description="Part of the model, as in `parameters.by_component`.")
    count: int = Field(description="Parameters of all copies.")


class CountedBatch(ResultSection):
    """The batch of one step."""

    sequence_length: int = Field(
        description="Tokens of a sequence; of an encoder-decoder those of the source."
    )
    target_length: int | None = Field(description="Tokens of a target; null for all other models.")
    sequences: int = Field(description="Sequences of a step.")
    tokens: int = Field(description="Tokens of a step.")


class BatchSize(CountedBatch):
    """The batch of one step, with the documents in a window."""

    documents: list[int] | None = Field(
        description="Lengths given by --documents; null: one document."
    )


class ConventionFlops(ResultSection):
    """FLOPs of a step in one convention."""

    forward: int = Field(description="Of a forward pass of the batch.")
    forward_backward: int = Field(description="Of a step.")
    forward_backward_per_token: float = Field(description="The same per token.")
    attention_share: float = Field(description="Share of attention's scores and sums.")


class StepFlops(ConventionFlops):
    """FLOPs of a step in the convention of the config, and in all."""

    convention: str = Field(description="`flops.convention` of the config.")
    conventions: dict[str, ConventionFlops] = Field(
        description="By convention: causal, full, hardware."
    )
    attention_share_by_length: dict[str, float] = Field(
        description="Share of attention by length of a sequence."
    )


class MemoryInstant(ResultSection):
    """One instant of a step."""

    name: str = Field(description="Words for it.")
    bytes: int = Field(description="Bytes that a rank holds.")
    items: dict[str, int] = Field(description="The same by category.")


class StepMemory(ResultSection):
    """Memory of one rank over one step."""

    peak_bytes: int = Field(description="Most bytes of an instant.")
    driver_bytes: int = Field(description="Bytes of the driver and of NCCL, which come on top.")
    peak_instant: str = Field(description="Name of that instant.")
    instants: list[MemoryInstant] = Field(description="Every instant of a step in its order.")


class RankMemory(StepMemory):
    """Memory of the fullest rank over one step, with what it consists of."""

    ranks: int = Field(description="Devices of the layout.")
    layout: dict[str, Any] = Field(description="Axes, as `layout.*` of a config.")
    engine: dict[str, Any] = Field(description="The engine, as `engine.*` of a config.")
    state_bytes: dict[str, int] = Field(
        description="Weights, masters, gradients, moments, and their total."
    )
    activation_bytes_estimated: dict[str, int] = Field(
        description="Parts that a forward pass brings."
    )
    needed_bytes: PercentileInterval = Field(
        description="Bytes that the device needs, with those of driver and NCCL."
    )
    capacity_bytes: int | None = Field(None, description="With a device: its memory.")
    fit_probability: float | None = Field(
        None, description="With a device: probability that the fullest rank fits."
    )


class RunSize(ResultSection):
    """The whole run."""

    tokens: int = Field(description="Tokens of all steps.")
    steps: int = Field(description="Optimizer steps.")
    flops: int = Field(description="FLOPs of all steps.")
    tokens_per_parameter: float = Field(description="Per parameter that a token uses.")


class Utilisation(ResultSection):
    """Share of the device's peak in a step."""

    model_causal: float = Field(description="Model FLOPs with exact causal attention.")
    model_full: float = Field(description="Model FLOPs with attention over all pairs.")
    hardware: float = Field(description="With what is computed again.")


class RunTime(ResultSection):
    """Hours of the whole run."""

    hours: PercentileInterval = Field(description="Hours from the first step to the last.")
    residual_factor: float = Field(description="Fitted factor of whole runs.")
    goodput: float = Field(description="Share of time in steps that count.")
    evaluation_share: float = Field(description="Seconds of evaluations over those of steps.")
    utilisation_model_causal: float = Field(description="Utilisation over the whole run.")
    checkpoint_every_seconds: float = Field(description="Seconds between saves.")
    failures_per_day: float = Field(description="Expected interruptions.")


class StepSeconds(ResultSection):
    """Seconds of a step, and what they are spent on."""

    step_seconds: PercentileInterval = Field(description="Seconds of a step.")
    parts_seconds: dict[str, float] = Field(description="Seconds of the P50 by cause.")
    residual_factor: float = Field(description="Fitted factor of the program, part of all seconds.")
    residual_spread: float = Field(
        description="Standard deviation of the logarithm of the seconds, that of P10 and P90."
    )
    program_spread: float = Field(
        description="Part of it that is between programs: what is not known of this one."
    )
    ranks: int = Field(description="Devices.")
    tokens_per_second_per_device: float = Field(description="At the P50.")
    utilisation: Utilisation = Field(description="At the P50.")


class StepPrice(StepSeconds):
    """Seconds of a step on a device, and of the whole run."""

    device: str = Field(description="Name of the device profile.")
    program: str = Field(description="Name of the program profile.")
    run: RunTime | None = Field(description="The whole run; null without a token budget.")


class RunMoney(ResultSection):
    """Money of the whole run."""

    currency: str = Field(description="Currency of the cluster file.")
    accelerator_hours: PercentileInterval = Field(description="Hours times devices.")
    amount: PercentileInterval = Field(description="Price of the run.")
    assumptions: dict[str, float] = Field(description="Prices and failure rates that it rests on.")


class RunEnergy(ResultSection):
    """Energy of the whole run."""

    kwh: PercentileInterval = Field(description="Kilowatt-hours of the site.")
    watts_per_device: float = Field(
        description="Mean power of a device with its share of the machine."
    )
    assumptions: dict[str, float] = Field(description="Shares and efficiency that it rests on.")


class ExportObstacle(ResultSection):
    """A key of the config that stands against an export."""

    key: str = Field(description="Key of the config.")
    value: Any = Field(description="Its value.")
    possible: Any = Field(description="The value that would do.")


class ExportOutput(ResultSection):
    """The export that `llmsys convert` will write."""

    model_type: str | None = Field(description="Hugging Face model type; null: it refuses.")
    line: str = Field(description="The same for people.")
    nearest: str | None = Field(description="Where it refuses: the type that lacks least.")
    obstacles: list[ExportObstacle] = Field(description="What that type cannot represent.")


class EstimateOutput(ResultSection):
    """`llmsys estimate CONFIG --json`."""

    parameters: ParameterCounts = Field(description="Exact counts.")
    batch: BatchSize = Field(description="The batch of one step.")
    flops: StepFlops = Field(description="FLOPs of one step.")
    memory: RankMemory | None = Field(
        description="Memory of a rank; null for a bare model without a batch."
    )
    run: RunSize | None = Field(description="The whole run; null without a token budget.")
    precision: PrecisionChoice = Field(description="Number type of activations.")
    unknown: dict[str, str] = Field(description="What is not estimated, with the reason.")
    export: ExportOutput | None = Field(None, description="The export to Hugging Face.")
    time: StepPrice | None = Field(None, description="With a device: seconds.")
    money: RunMoney | None = Field(None, description="With a device and a token budget: money.")
    energy: RunEnergy | None = Field(None, description="The same: energy.")
    tensors: list[TensorCount] | None = Field(None, description="With --explain: every tensor.")
    finetune: FinetuneOutput | None = Field(
        None, description="With --finetune: memory and time of adapters."
    )
    page: str | None = Field(None, description="With --html: the file.")
