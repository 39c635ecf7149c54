"""Who does the work of preparing a dataset; never changes its bytes."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.base import Section


class LocalExecutor(Section):
    """Worker processes on this machine."""

    kind: Literal["local"] = "local"
    workers: int = Field(0, ge=0, description="Number of processes; 0: one per core this process may use.")
    tries: int = Field(3, ge=1, description="How often a task may lose its process before the run gives up on it.")


class InlineExecutor(Section):
    """This very process, one task after the other: for debugging and for tests."""

    kind: Literal["inline"] = "inline"


ExecutorConfig = Annotated[LocalExecutor | InlineExecutor, Field(discriminator="kind")]
