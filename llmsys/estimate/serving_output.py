"""Types of the objects that `llmsys estimate --serve --json` and `--finetune --json` print.

Invariants:
- Every key that these commands print is a field here, and no other
  (tests/llmsys/estimate/test_json_output.py).
"""

from pydantic import Field

from llmsys.config.section import ResultSection
from llmsys.config.serving import FinetuneConfig, ServingConfig
from llmsys.estimate.percentile_interval import PercentileInterval


class ServingRates(ResultSection):
    """Tokens of answers in a second."""

    one_request: float = Field(description="Of one request while it is answered.")
    decoding: float = Field(description="Of all requests while they are answered.")
    with_prompts: float = Field(description="Of all requests, with the time of their prompts.")


class ServingMoney(ResultSection):
    """Prices of served tokens."""

    currency: str = Field(description="Currency of the cluster file.")
    price_per_hour: float = Field(description="Price of a device.")
    per_million_prompt_tokens: float = Field(description="Of the time of prompts.")
    per_million_output_tokens: float = Field(description="Of the time of answers.")
    per_million_tokens: float = Field(description="Of both together.")


class ServingOutput(ResultSection):
    """`llmsys estimate CONFIG --serve LOAD --json` without a device."""

    load: ServingConfig = Field(description="The load.")
    gpus: int = Field(description="Devices that share every layer.")
    memory_bytes: dict[str, float] = Field(
        description="On each device: weights, cache, workspace, and their total."
    )
    cache_bytes_per_request: float = Field(description="The same of one request.")


class TimedServingOutput(ServingOutput):
    """`llmsys estimate CONFIG --serve LOAD --device NAME --json`."""

    device: str = Field(description="Name of the device profile.")
    device_memory_bytes: float = Field(description="Memory of a device.")
    fits: bool = Field(description="The load fits in 95 % of it.")
    largest_batch: int = Field(description="Most requests of this length that fit.")
    first_token_seconds: float = Field(description="To the first token of one prompt alone.")
    all_first_tokens_seconds: float = Field(description="To that of the last request of the batch.")
    step_seconds: float = Field(
        description="To a further token of each, halfway through the answer."
    )
    tokens_per_second: ServingRates = Field(description="Tokens of answers in a second.")
    utilisation: float = Field(description="Share of the peak in bf16, prompts included.")
    money: ServingMoney = Field(description="Prices of served tokens.")


class FinetuneFlops(ResultSection):
    """Operations of a step."""

    forward: int = Field(description="Forward pass of the frozen weights.")
    input_gradients: int = Field(
        description="Gradients of what matrices read, where something before is trained."
    )
    weight_gradients: int = Field(description="Gradients of trained weights.")
    adapters: int = Field(description="Adapters, forward and backward.")
    total: int = Field(description="All of them.")
    share_of_full: float = Field(description="Over those of full training.")


class FinetuneMemory(ResultSection):
    """Memory of a rank."""

    state_bytes: dict[str, float] = Field(
        description="State of the trained part, and the frozen weights."
    )
    peak_bytes: int = Field(description="Most bytes of an instant.")
    peak_instant: str = Field(description="Name of that instant.")


class FinetuneOutput(ResultSection):
    """`finetune` of `llmsys estimate CONFIG --finetune PART --json`."""

    settings: FinetuneConfig = Field(description="The part that is trained.")
    trained_parameters: int = Field(description="Parameters that the optimizer updates.")
    adapter_parameters: int = Field(description="Those of adapters.")
    trained_share: float = Field(description="Trained ones over all.")
    flops: FinetuneFlops = Field(description="Operations of a step.")
    memory: FinetuneMemory | None = Field(
        None, description="Memory of a rank; missing without a batch."
    )
    step_seconds: PercentileInterval | None = Field(
        None, description="With a device: seconds of a step."
    )
    speedup: float | None = Field(None, description="Seconds of full training over these.")
