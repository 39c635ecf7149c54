"""Types of the object that `llmsys estimate --json` prints for a model type that is counted and
not built.
"""

from pydantic import Field

from llmsys.config.section import ResultSection
from llmsys.estimate.json_output import ConventionFlops, CountedBatch, TensorCount
from llmsys.estimate.model_tensors import ComponentCounts


class CountedFlops(ConventionFlops):
    """FLOPs of a step in one convention."""

    scan_share: float = Field(description="Share of state-space scans.")


class CountedStepFlops(CountedFlops):
    """FLOPs of a step, and in both conventions."""

    convention: str = Field(description="causal.")
    conventions: dict[str, CountedFlops] = Field(description="By convention: causal, full.")


class CountedOutput(ResultSection):
    """`llmsys estimate FOLDER --json` for a model type that llmsys counts and does not build."""

    model_type: str = Field(description="`model_type` of its config.json.")
    parameters: ComponentCounts = Field(description="Exact counts.")
    batch: CountedBatch = Field(description="The batch of one step.")
    flops: CountedStepFlops = Field(description="FLOPs of one step.")
    weights_bytes: dict[str, int] = Field(description="Bytes of all weights by number type.")
    memory: None = Field(description="Always null.")
    run: None = Field(description="Always null.")
    unknown: dict[str, str] = Field(description="What is not estimated, with the reason.")
    tensors: list[TensorCount] | None = Field(None, description="With --explain: every tensor.")
