"""What a block keeps from its forward to its backward is what the estimate lists, to the byte, under every policy.

Measured on our own modules as the storages that are alive after a forward pass, whoever holds them. A stack of one more
layer keeps one more block, so nothing outside of blocks enters.
"""

from typing import Any

import pytest
import torch

from llmsys.parallel.activation_checkpoint import ActivationCheckpointMode
from tests.helpers.model_sections import VARIANTS
from tests.helpers.saved_bytes import LENGTH, SEQUENCES, compare_saved_bytes

POLICIES: tuple[ActivationCheckpointMode, ...] = ("none", "selective", "full")
# Small things that are not counted: sums of the balance loss, a gate of one channel, masks shared by few blocks.
ABOUT = {
    "experts balanced by a loss",
    "gated shared expert of its own width",
    "expert and router biases",
    "sinks",
    "transformer-xl",
    "transformer-xl without biases",
}
# Norms with 1 + weight are counted as if each kept a copy of its input in float32; some share it.
# The few queries of global tokens are counted with the kernel of the windows; lists of dilated heads are not counted.
ABOVE = {"sandwich, capped, windows", "longformer", "longformer, dilated"}


BUILT = {name: changes for name, changes in VARIANTS.items() if "dense_layers" not in changes.get("moe", {})}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", BUILT.values(), ids=BUILT)
def test_a_block_keeps_what_is_listed(changes: dict[str, Any], dtype: torch.dtype, request: Any) -> None:
    name = next(name for name, one in BUILT.items() if one is changes)
    for policy in POLICIES:
        measured, predicted = compare_saved_bytes(changes, dtype, policy, documents=False)
        if name in ABOVE:
            assert measured * 0.99 <= predicted <= 1.1 * measured, policy
        elif name in ABOUT:
            assert predicted == pytest.approx(measured, rel=0.01, abs=32), policy
        else:
            assert predicted == measured, policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_table_of_documents_is_kept_as_numbers_by_kernels_alone(dtype: torch.dtype) -> None:
    measured, predicted = compare_saved_bytes({}, dtype, "none", documents=True)
    without, _ = compare_saved_bytes({}, dtype, "none", documents=False)
    assert measured == predicted
    assert measured - without == (SEQUENCES * LENGTH**2 * 4 if dtype == torch.float32 else 0)
