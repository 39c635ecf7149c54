"""What full activation checkpointing computes again, and permutations inside of the dispatch."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from llmsys.config.loading.load import load_model_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.communication_time import RankGroup, estimate_all_to_all_seconds
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.kernel_context import KernelContext, MicroBatchShape
from llmsys.estimate.program_profile import ProgramProfile, load_program_profile
from llmsys.estimate.software_profile import SoftwareProfile
from llmsys.estimate.step_time import estimate_step_time

H100 = load_device_profile("h100-sxm")
MIXTURE = "model/qwen3-30b-a3b"


def price(model: str, layout: ParallelLayout, **time: Any) -> dict[str, float]:
    config = RunConfig.model_validate(
        {
            "model": load_model_config(model),
            "batch": {"sequence_length": 4096, "sequences": 8, "micro_sequences": 1},
            "train": {"tokens": 1e9, "activation_checkpoint": "full"},
        }
    )
    program = ProgramProfile(name="one", description="one", time=SoftwareProfile(**time))
    step = estimate_step_time(config, layout, H100, program=program)
    return {name: seconds / step.factor for name, seconds in step.parts.items()}


class MatmulCounter(TorchDispatchMode):
    """Count of matrix products by the shape of their second factor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self.found[tuple(args[1].shape)] += 1
        return func(*args, **(kwargs or {}))


def count_backward_matmuls(block: Callable[[Tensor], Tensor]) -> Counter[tuple[int, ...]]:
    """Count the products of a checkpointed block's backward."""
    x = torch.randn(4, 8, requires_grad=True)
    loss = checkpoint(block, x, use_reentrant=False).sum()
    with MatmulCounter() as counter:
        loss.backward()
    return counter.found


def test_torch_does_not_repeat_the_last_product_of_a_block() -> None:
    up, down = (torch.randn(*shape, requires_grad=True) for shape in ((8, 16), (16, 8)))
    found = count_backward_matmuls(lambda x: x + torch.relu(x @ up) @ down)
    assert found[8, 16] == 2  # `x @ up` again, and the gradient of what relu returned
    assert found[16, 8] == 1  # the gradient of x alone: `x @ down` is not computed again


def test_only_what_the_backward_needs_is_repeated() -> None:
    layout = ParallelLayout(shard=8)
    block, needed = (price("model/llama3.1-8b", layout, repeats=one) for one in ("block", "needed"))
    shape = MicroBatchShape(1.0, 4096, 0, "bf16")
    bench = KernelContext(
        load_model_config("model/llama3.1-8b"), layout, H100, SoftwareProfile(), shape
    )
    down = 32 * bench.estimate_matmul_seconds(4096, 14336, 4096)
    assert block["recomputation"] - needed["recomputation"] == pytest.approx(down)
    assert {**block, "recomputation": 0} == {**needed, "recomputation": 0}


def test_the_scatter_behind_the_last_product_is_not_repeated() -> None:
    layout = ParallelLayout(shard=1, tensor=8)
    block, needed = (price("model/llama3.1-8b", layout, repeats=one) for one in ("block", "needed"))
    # Forward 4 collectives, repeated 4 or 3, backward 6; all send as many bytes.
    assert needed["tensor"] / block["tensor"] == pytest.approx(13 / 14)


def test_outputs_of_experts_are_not_brought_back_again() -> None:
    layout = ParallelLayout(shard=8, expert=8)
    block, needed = (price(MIXTURE, layout, repeats=one) for one in ("block", "needed"))
    # Out and back, forward and backward, and once more or only out.
    one = estimate_all_to_all_seconds(RankGroup(8), 4096 * 8 * 2048 * 2.0, H100)
    assert block["expert"] == pytest.approx(6 * 48 * one)
    assert needed["expert"] == pytest.approx(5 * 48 * one)
    # A third of the experts' products, and half of the permutation.
    saved = block["recomputation"] - needed["recomputation"]
    assert saved == pytest.approx(block["experts"] / 9 + block["permutation"] / 6, rel=0.02)


def test_a_dispatch_that_permutes_leaves_the_scores_of_the_router() -> None:
    layout = ParallelLayout(shard=8, expert=8)
    own, within = (price(MIXTURE, layout, permutation=one) for one in ("kernels", "dispatch"))
    # 5 passes over the vectors of 8 visits, and 3 over 128 scores; no vectors at all.
    scores = 3 * 128 / (5 * 8 * 2048 + 3 * 128)
    assert within["permutation"] / own["permutation"] == pytest.approx(scores, rel=0.2)
    alone = ParallelLayout(shard=8)
    assert price(MIXTURE, alone, permutation="dispatch") == price(MIXTURE, alone)


def test_shipped_programs_repeat_what_their_sources_say() -> None:
    needed, block = (load_program_profile(name).time for name in ("automodel", "torchtitan-deepep"))
    assert (needed.repeats, block.repeats) == ("needed", "block")
    assert load_program_profile("megatron-graph").time.permutation == "dispatch"
