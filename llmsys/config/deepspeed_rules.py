"""What DeepSpeed cannot do with the rest of a config. Each problem says value, rule and remedy.

Axes that only the torch engine has, `tensor` and `context`, are refused in axes.py.
"""

from collections.abc import Iterator

from llmsys.config.engine import EngineConfig
from llmsys.config.rule import Violation


def find_deepspeed_violations(engine: EngineConfig, *, replicate: int, expert: int) -> Iterator[Violation]:
    """What forbids this engine, if it is DeepSpeed, with these axes of the layout."""
    if engine.kind != "deepspeed":
        return
    if engine.zero_stage == 3 and expert > 1:
        yield Violation(
            "engine.zero_stage",
            f"3 splits every expert over all ranks and cannot deal whole ones over layout.expert={expert}. "
            f"Use engine.kind=torch, which does both, or zero_stage=2, or layout.expert=1.",
        )
    if engine.zero_stage == 0 and engine.offload == "optimizer":
        yield Violation(
            "engine.offload",
            "optimizer moves what a rank has alone to host memory, and with zero_stage=0 every rank has everything. "
            "Use zero_stage=1, 2 or 3, or offload=none.",
        )
    if engine.zero_stage > 0 and replicate > 1:
        yield Violation(
            "layout.replicate",
            f"{replicate} copies cannot be kept by DeepSpeed: zero_stage={engine.zero_stage} splits over all ranks. "
            f"Use layout.replicate=1, or engine.kind=torch.",
        )
