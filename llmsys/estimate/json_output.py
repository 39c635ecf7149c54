"""Types of the objects that `llmsys estimate --json`, `plan --json` and `plan --check --json`
print.

The documentation has a table and a JSON Schema of each (`tools/docs/json_reference.py`).

Invariants:
- Every key that these commands print is a field here, and no other
  (tests/llmsys/estimate/test_json_output.py).
- Bytes, FLOPs and seconds are plain numbers in these units. What is not known exactly has P10, P50
  and P90.
"""

from typing import Any

from pydantic import Field

from llmsys.config.section import Section
from llmsys.estimate.serving_output import FinetuneOutput, Percentiles


class ActiveParameters(Section):
    """Parameters that one token uses, in the three usual conventions."""

    all: int = Field(description="Every parameter that is used.")
    without_input_embedding: int = Field(description="Without the table of the input tokens.")
    without_embeddings: int = Field(description="Without that table and the head.")


class TextbookRule(Section):
    """A usual formula, and its error for this model."""

    rule: str = Field(description="The formula.")
    value: float = Field(description="Parameters by it.")
    error: float = Field(description="Relative to the exact count.")


class ParameterCounts(Section):
    """Exact counts of parameters."""

    total: int = Field(description="Parameters, tied ones once.")
    non_embedding: int = Field(description="Without embeddings and an untied head.")
    active: ActiveParameters = Field(description="Parameters that one token uses.")
    by_component: dict[str, int] = Field(description="Parameters by component.")
    per_layer: dict[str, int] = Field(description="Parameters of one layer by its kind.")
    textbook: list[TextbookRule] = Field(description="Formulas of textbooks.")


class BatchSize(Section):
    """The batch of one step."""

    sequence_length: int = Field(
        description="Tokens of a sequence; of an encoder-decoder those of the source."
    )
    target_length: int | None = Field(description="Tokens of a target; null for all other models.")
    sequences: int = Field(description="Sequences of a step.")
    tokens: int = Field(description="Tokens of a step.")
    documents: list[int] | None = Field(
        description="Lengths given by --documents; null: one document."
    )


class ConventionFlops(Section):
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


class MemoryInstant(Section):
    """One instant of a step."""

    name: str = Field(description="Words for it.")
    bytes: int = Field(description="Bytes that a rank holds.")
    items: dict[str, int] = Field(description="The same by category.")


class RankMemory(Section):
    """Memory of the fullest rank over one step."""

    ranks: int = Field(description="Devices of the layout.")
    layout: dict[str, Any] = Field(description="Axes, as `layout.*` of a config.")
    engine: dict[str, Any] = Field(description="The engine, as `engine.*` of a config.")
    state_bytes: dict[str, int] = Field(
        description="Weights, masters, gradients, moments, and their total."
    )
    activation_bytes_estimated: dict[str, int] = Field(
        description="Parts that a forward pass brings."
    )
    peak_bytes: int = Field(description="Most bytes of an instant.")
    driver_bytes: int = Field(description="Bytes of the driver and of NCCL, which come on top.")
    peak_instant: str = Field(description="Name of that instant.")
    instants: list[MemoryInstant] = Field(description="Every instant of a step in its order.")


class RunSize(Section):
    """The whole run."""

    tokens: int = Field(description="Tokens of all steps.")
    steps: int = Field(description="Optimizer steps.")
    flops: int = Field(description="FLOPs of all steps.")
    tokens_per_parameter: float = Field(description="Per parameter that a token uses.")


class PrecisionChoice(Section):
    """The number type that the estimate counts with."""

    number: str = Field(description="bf16, fp16 or fp32.")
    reason: str = Field(description="Why it is that one.")


class Utilisation(Section):
    """Share of the device's peak in a step."""

    model_causal: float = Field(description="Model FLOPs with exact causal attention.")
    model_full: float = Field(description="Model FLOPs with attention over all pairs.")
    hardware: float = Field(description="With what is computed again.")


class RunTime(Section):
    """Hours of the whole run."""

    hours: Percentiles = Field(description="Hours from the first step to the last.")
    residual_factor: float = Field(description="Fitted factor of whole runs.")
    goodput: float = Field(description="Share of time in steps that count.")
    evaluation_share: float = Field(description="Seconds of evaluations over those of steps.")
    utilisation_model_causal: float = Field(description="Utilisation over the whole run.")
    checkpoint_every_seconds: float = Field(description="Seconds between saves.")
    failures_per_day: float = Field(description="Expected interruptions.")


class StepPrice(Section):
    """Seconds of a step on a device."""

    device: str = Field(description="Name of the device profile.")
    program: str = Field(description="Name of the program profile.")
    step_seconds: Percentiles = Field(description="Seconds of a step.")
    parts_seconds: dict[str, float] = Field(description="Seconds of the P50 by cause.")
    residual_factor: float = Field(description="Fitted factor of the program, part of all seconds.")
    ranks: int = Field(description="Devices.")
    tokens_per_second_per_device: float = Field(description="At the P50.")
    utilisation: Utilisation = Field(description="At the P50.")
    run: RunTime | None = Field(description="The whole run; null without a token budget.")


class RunMoney(Section):
    """Money of the whole run."""

    currency: str = Field(description="Currency of the cluster file.")
    accelerator_hours: Percentiles = Field(description="Hours times devices.")
    amount: Percentiles = Field(description="Price of the run.")
    assumptions: dict[str, float] = Field(description="Prices and failure rates that it rests on.")


class RunEnergy(Section):
    """Energy of the whole run."""

    kwh: Percentiles = Field(description="Kilowatt-hours of the site.")
    watts_per_device: float = Field(
        description="Mean power of a device with its share of the machine."
    )
    assumptions: dict[str, float] = Field(description="Shares and efficiency that it rests on.")


class EstimateOutput(Section):
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
    time: StepPrice | None = Field(None, description="With a device: seconds.")
    money: RunMoney | None = Field(None, description="With a device and a token budget: money.")
    energy: RunEnergy | None = Field(None, description="The same: energy.")
    tensors: list[dict[str, Any]] | None = Field(None, description="With --explain: every tensor.")
    finetune: FinetuneOutput | None = Field(
        None, description="With --finetune: memory and time of adapters."
    )
    page: str | None = Field(None, description="With --html: the file.")


class LayoutPrice(Section):
    """Time and memory of a layout."""

    step_seconds: Percentiles = Field(description="Seconds of a step.")
    tokens_per_second_per_device: float = Field(description="At the P50.")
    utilisation: float = Field(description="Model FLOPs with causal attention over the peak.")
    peak_bytes: int = Field(description="Most bytes of the fullest rank.")
    driver_bytes: int = Field(description="Bytes that come on top.")
    peak_instant: str = Field(description="When.")


class PricedLayout(LayoutPrice):
    """A layout that fits."""

    choice: str = Field(description="Its axes, micro-batch and recomputation in one line.")
    engine: dict[str, Any] = Field(description="As `engine.*` of a config.")
    layout: dict[str, Any] = Field(description="As `layout.*` of a config.")
    recompute: str = Field(description="As `train.activation_checkpoint`.")
    micro_sequences: int = Field(description="As `batch.micro_sequences`.")
    largest: dict[str, int] = Field(description="The three largest items of that instant.")


class RejectedLayout(Section):
    """A neighbour of the best layout."""

    change: str = Field(description="What differs from the best.")
    reason: str = Field(description="illegal, memory or time, and by how much.")


class PlannedRun(Section):
    """Hours and money in the fastest layout."""

    hours: Percentiles = Field(description="Hours of the run.")
    accelerator_hours: Percentiles = Field(description="Hours times devices.")
    amount: Percentiles = Field(description="Price of the run.")
    currency: str = Field(description="Currency of the cluster file.")


class PlannedProgram(LayoutPrice):
    """The fastest layout of another program."""

    program: str = Field(description="Its name.")
    layout: str = Field(description="Axes in one line.")


class PlanOutput(Section):
    """`llmsys plan CONFIG gpus=N device=NAME --json`."""

    device: str = Field(description="Name of the device profile.")
    considered: int = Field(description="Layouts that were looked at.")
    fitting: int = Field(description="Those that fit.")
    best: list[PricedLayout] = Field(description="The fastest, as many as --top.")
    pareto: list[PricedLayout] = Field(description="Each needs less memory than all faster ones.")
    rejected: list[RejectedLayout] = Field(description="Neighbours of the best, with what binds.")
    programs: list[PlannedProgram] = Field(description="Those that program= names.")
    launch: str = Field(description="Command that starts the fastest layout.")
    dryrun: str = Field(description="Command that runs one rank of it without a GPU; may be empty.")
    run: PlannedRun | None = Field(None, description="With train.tokens: the whole run.")
    config: str | None = Field(None, description="With --output: the file.")
    page: str | None = Field(None, description="With --html: the file.")


class LayoutCheckOutput(Section):
    """`llmsys plan CONFIG --check LAYOUT --json`."""

    legal: bool = Field(description="The layout breaks no rule.")
    devices: int = Field(description="Devices of the layout.")
    problems: list[str] = Field(description="Rules that it breaks, with the next step.")
    remarks: list[str] = Field(description="What to know about a legal one.")
    program: str | None = Field(None, description="Program that was priced.")
    fits: bool | None = Field(None, description="The fullest rank fits the device.")
    peak_bytes: int | None = Field(
        None, description="Bytes of the fullest rank, with those of the driver."
    )
    memory: str | None = Field(None, description="The same as a sentence.")
    assumed: list[str] | None = Field(
        None,
        description="What the memory of the program rests on and no source gives, with the memory "
        "without it.",
    )
    step_seconds: Percentiles | None = Field(None, description="Seconds of a step.")
    time: str | None = Field(None, description="The same as a sentence.")
    own: str | None = Field(None, description="With --compare: the layout that a plan chooses.")
