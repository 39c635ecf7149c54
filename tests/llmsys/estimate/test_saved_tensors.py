"""What a block keeps from its forward to its backward is what the estimate lists, to the byte,
under every policy.

Measured on our own modules as the storages that are alive after a forward pass, whoever holds them.
A stack of one more layer keeps one more block, so nothing outside of blocks enters.
"""

from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import (
    build_activation_shape,
    compute_mask_bytes,
    iter_block_groups,
)
from llmsys.estimate.memory_timeline import select_saved_tensors
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.parallel.activation_checkpoint import ActivationCheckpointMode
from tests.helpers.model_sections import SHAPE, VARIANTS
from tests.helpers.saved_bytes import LENGTH, SEQUENCES, compare_saved_bytes

POLICIES: tuple[ActivationCheckpointMode, ...] = ("none", "selective", "full")
# Small things that are not counted: sums of the balance loss, a gate of one channel, masks shared
# by few blocks.
ABOUT = {
    "latent and sparse",
    "latent and sparse, warm-up, neighbours",
    "predicts further with experts and sparse latents",
    "experts balanced by a loss",
    "gated shared expert of its own width",
    "expert and router biases",
    "sinks",
    "transformer-xl",
    "transformer-xl without biases",
}
# Norms with 1 + weight are counted as if each kept a copy of its input in float32; some share it.
# The few queries of global tokens are counted with the kernel of the windows; lists of dilated
# heads are not counted.
ABOVE = {"sandwich, capped, windows", "longformer", "longformer, dilated", "dilated windows"}


BUILT = {
    name: changes
    for name, changes in VARIANTS.items()
    if "dense_layers" not in changes.get("moe", {})
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", BUILT.values(), ids=BUILT)
def test_a_block_keeps_what_is_listed(
    changes: dict[str, Any], dtype: torch.dtype, request: Any
) -> None:
    name = next(name for name, one in BUILT.items() if one is changes)
    # Recurrent layers have no blocks to compute again.
    for policy in POLICIES[: 1 if "rnn" in changes else None]:
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


@pytest.mark.parametrize(
    ("capability", "has_table"), [((9, 0), False), ((8, 0), False), ((7, 5), True)]
)
def test_documents_cost_a_table_only_where_the_model_would_take_a_kernel_with_one(
    capability: tuple[int, int], has_table: bool
) -> None:
    """Heads in groups: with a table, keys and values are copied for every query head."""
    model = ModelConfig.model_validate(SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2})
    config = RunConfig.model_validate(
        {
            "model": model,
            "batch": {"sequence_length": 64, "sequences": 2},
            "train": {"precision": "bf16"},
        }
    )
    system = MemoryProfile(capability=capability)
    shape = build_activation_shape(config, ParallelLayout(shard=1), system)
    [group] = iter_block_groups(config, shape)
    saved = {one.name: one.bytes for one in group.saved_tensors if one.is_saved}
    tables = {
        "table as numbers": 2 * 64**2 * 2,
        "keys and values of every head": 2 * 2 * 64 * model.hidden_size * 2,
    }
    assert {name: saved.get(name, 0) for name in tables} == (
        tables if has_table else dict.fromkeys(tables, 0)
    )
    assert compute_mask_bytes(model, shape) == (2 * 64**2 if has_table else 0)
    # In place of the copies the kernel saves keys and values as they are.
    assert ("rotated keys" in saved) is not has_table


def test_flex_attention_is_saved_but_under_selective_checkpointing() -> None:
    capped = ModelConfig.model_validate(
        SHAPE | {"attention": {"kind": "multi_head", "logit_softcap": 30.0}}
    )
    config = RunConfig.model_validate(
        {
            "model": capped,
            "batch": {"sequence_length": 64, "sequences": 2},
            "train": {"precision": "bf16"},
        }
    )
    shape = build_activation_shape(config, ParallelLayout(shard=1))
    [group] = iter_block_groups(config, shape)
    names = {policy: {one.name for one in select_saved_tensors(group.saved_tensors, policy, False,
        MemoryProfile())}
             for policy in ("none", "selective")}  # fmt: skip
    flex = {"logsumexp", "attention output"}
    assert flex <= names["none"]
    assert not flex & names["selective"]
    assert not any(name.startswith("scores") for name in names["none"])
