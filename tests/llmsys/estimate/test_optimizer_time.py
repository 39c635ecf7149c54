"""Seconds of the optimizer step: bytes for every optimizer, and the products that orthogonalize
Muon's matrices.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.engine import DeepSpeedEngineConfig
from llmsys.config.optimizer import MuonConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.estimate.kernel_context import KernelContext, MicroBatchShape
from llmsys.estimate.optimizer_time import count_newton_schulz_flops, estimate_optimizer_seconds
from llmsys.estimate.software_profile import SoftwareProfile
from llmsys.optim.muon import orthogonalize_matrices
from tests.llmsys.estimate.test_step_time import DENSE, H100, run


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_newton_schulz_counts_what_torch_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize_matrices(torch.ones(shape), 3)
    assert count_newton_schulz_flops(*shape, 3) == counter.get_total_flops()


def test_muon_adds_its_products_which_ranks_share_unless_two_axes_shard_a_matrix() -> None:
    def estimate(layout: ParallelLayout, stage: int | None = None, **optimizer: int) -> float:
        config = run()
        if stage is not None:
            config = config.model_copy(update={"engine": DeepSpeedEngineConfig(zero_stage=stage)})
        if optimizer:
            config = config.model_copy(update={"optimizer": MuonConfig(**optimizer)})
        bench = KernelContext(
            DENSE, layout, H100, SoftwareProfile(), MicroBatchShape(1, 4096, 4096, "bf16")
        )
        return estimate_optimizer_seconds(config, bench, 1)

    alone = ParallelLayout(shard=1)
    few, many = (estimate(alone, newton_schulz_steps=steps) - estimate(alone) for steps in (2, 6))
    assert many == pytest.approx(3 * few)
    products = sum(
        6 * (4 * min(a, b) ** 2 * max(a, b) + 2 * min(a, b) ** 3)
        for a, b in [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    )
    assert many == pytest.approx(
        32 * products / (H100.get_peak_flops("bf16") * H100.efficiency.products)
    )
    shared, repeated = (
        estimate(layout, newton_schulz_steps=6) - estimate(layout)
        for layout in (ParallelLayout(shard=8), ParallelLayout(shard=4, tensor=2))
    )
    assert many / 8 < shared < many / 6
    # Put together by all ranks in flat shards; every rank has each matrix in stage 0.
    shard = ParallelLayout(shard=8)
    flat, whole = (
        estimate(shard, stage, newton_schulz_steps=6) - estimate(shard, stage) for stage in (1, 0)
    )
    assert shared < flat < whole == pytest.approx(many)
    assert repeated > many
