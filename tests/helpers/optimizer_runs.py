"""Runs of a tiny encoder under every engine, with a step whose loss gives the head no gradient."""

from typing import Any

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import OptimizerConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import IGNORED
from llmsys.engine.engine import Engine
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.objective_batches import SHAPE, build_batch
from tests.helpers.parity_runs import gather_full_state

RATE, DECAY, STEPS = 1e-2, 0.5, 4
WITHOUT_HEAD = 2
"""The step whose loss does not look at the head."""
MODEL = SHAPE | {
    "family": "encoder", "head": {"kind": "mlm", "pooler": True, "next_sentence": True},
    "position": {"kind": "learned"}, "tie_word_embeddings": False,
}  # fmt: skip
COPIED = ("ddp", "accelerate")
"""Under DDP every parameter that a loss ever looks at needs a gradient in every step."""
NUDGED = {"torch faster": 1 + 1e-4, "torch slower": 1 - 1e-4}
"""Runs whose rate is off by so little that weights of size 0.1 differ by 1e-5 of themselves after a
step, the band of float32."""


class Loss:
    """Masked cross entropy; in some steps a loss of the hidden states, which gives the head no
    gradient.
    """

    step = 0

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self._masked = build_training_loss(LossConfig())

    def __call__(
        self,
        head: nn.Module | None,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        losses_BT: Tensor | None = None,
        /,
    ) -> Tensor:
        if self.skips and self.step == WITHOUT_HEAD:
            return (hidden_BTD.float().square().sum(-1) * (targets_BT != IGNORED)).sum()
        return self._masked(head, hidden_BTD, targets_BT, losses_BT)


def build_engine(kind: str, loss: Loss, optimizer: OptimizerConfig) -> Engine:
    device, config = torch.device("cpu"), ModelConfig.model_validate(MODEL)
    with torch.device("meta"):
        model = Transformer(config)
    ranks = torch.distributed.get_world_size()
    layout = ParallelLayout(replicate=ranks if kind == "ddp" else 1)
    common: dict[str, Any] = {
        "meshes": build_device_meshes(layout.resolve(ranks, config), device),
        "optimizer": optimizer, "loss": loss,
        "compute_dtype": torch.float32, "seed": 7, "device": device,
    }  # fmt: skip
    if kind in ("torch", "ddp"):
        from llmsys.engine.torch_engine import TorchEngine

        return TorchEngine(model, **common, data_parallel="ddp" if kind == "ddp" else "fsdp")
    if kind == "bitwise":
        from llmsys.engine.bitwise_engine import BitwiseEngine

        return BitwiseEngine(model, **common)
    if kind == "accelerate":
        from llmsys.engine.accelerate_engine import AccelerateEngine

        return AccelerateEngine(model, **common)
    from llmsys.engine.deepspeed_engine import DeepSpeedEngine

    stage: Any = int(kind[4])
    offload: Any = "optimizer" if "offload" in kind else "none"
    return DeepSpeedEngine(model, zero_stage=stage, offload=offload, **common)


def take_steps(
    engine: Engine,
    loss: Loss,
    steps: range,
    rank: int = 0,
    size: int = 1,
    *,
    warmup_steps: int = 1,
    factor: float = 1.0,
) -> None:
    for step in steps:
        loss.step = step
        rate = factor * RATE * min(1.0, (step + 1) / warmup_steps)
        engine.train_step([build_batch("masked", step, 0, list(range(6))[rank::size])], rate)


def run_engines(rank: int, kinds: tuple[str, ...], optimizer: OptimizerConfig) -> list[Any]:
    size, found = torch.distributed.get_world_size(), []
    for kind in kinds:
        loss = Loss(skips=kind not in COPIED)
        engine = build_engine("torch" if kind in NUDGED else kind, loss, optimizer)
        take_steps(engine, loss, range(STEPS), rank, size, factor=NUDGED.get(kind, 1.0))
        found.append((gather_full_state(engine), engine.get_state().steps))
    return found if rank == 0 else []
