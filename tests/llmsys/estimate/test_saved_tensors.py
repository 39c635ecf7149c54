"""What a block keeps from its forward to its backward is what the estimate lists, to the byte, under every policy.

Measured on our own modules as the storages that are alive after a forward pass, whoever holds them. A stack of one more
layer keeps one more block, so nothing outside of blocks enters.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import build_activation_shape, iter_block_groups
from llmsys.estimate.saved_tensors import compute_saved_bytes
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import Recompute, apply_activation_checkpoint
from tests.helpers.live_memory import kept_after
from tests.helpers.model_sections import SHAPE, VARIANTS

SEQUENCES, LENGTH, SOURCE = 2, 16, 24
POLICIES: tuple[Recompute, ...] = ("none", "selective", "full")
ON_CPU = MemoryProfile(device="cpu")
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
ABOVE = {"sandwich, capped, windows"}


def models(changes: dict[str, Any]) -> tuple[ModelConfig, ModelConfig]:
    """The model, and the same with one more block of each kind."""
    base = SHAPE | changes
    period = 2 if "layer_types" in base or "every" in base.get("moe", {}) else 1
    return shaped(base, 2), shaped(base, 2 + period)


def shaped(base: dict[str, Any], layers: int) -> ModelConfig:
    stacks: dict[str, Any] = {"num_hidden_layers": layers}
    if "encoder" in base:
        stacks["encoder"] = base["encoder"] | stacks
    return ModelConfig.model_validate(base | stacks)


@cache
def kept_by_forward(model: ModelConfig, dtype: torch.dtype, policy: Recompute, *, documents: bool) -> int:
    torch.manual_seed(0)
    module = Transformer(model).to(dtype)
    module.reset_buffers()
    module.train()
    apply_activation_checkpoint(module, policy)
    inputs: dict[str, Any] = {}
    if model.family == "encoder_decoder":
        inputs["source_BS"] = torch.zeros(SEQUENCES, SOURCE, dtype=torch.long)
    if documents:
        inputs["documents_BT"] = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    tokens_BT = torch.randint(0, model.vocab_size, (SEQUENCES, LENGTH))

    def forward() -> torch.Tensor:
        given: torch.Tensor = module(tokens_BT, finish=lambda head, hidden, places: hidden, **inputs)
        return given

    forward()  # tables of rotations are there from now on
    return kept_after(forward, *module.parameters(), *module.buffers())


def estimated(model: ModelConfig, dtype: torch.dtype, policy: Recompute, *, documents: bool) -> int:
    pairs = model.family == "encoder_decoder"
    batch = {"sequence_length": SOURCE if pairs else LENGTH, "sequences": SEQUENCES} | (
        {"target_sequence_length": LENGTH} if pairs else {}
    )
    config = RunConfig.model_validate(
        {
            "model": model,
            "batch": batch,
            "train": {"precision": "bf16" if dtype == torch.bfloat16 else "fp32", "activation_checkpoint": policy},
        }
    )
    shape = build_activation_shape(config, ParallelLayout(shard=1), ON_CPU)
    if not documents and shape.mask_table == "documents":
        shape = replace(shape, mask_table="none")
    kinds = iter_block_groups(config, shape)
    return sum(len(kind.layers) * compute_saved_bytes(kind.saved_tensors, policy, False, ON_CPU) for kind in kinds)


def compared(changes: dict[str, Any], dtype: torch.dtype, policy: Recompute, *, documents: bool) -> tuple[int, int]:
    fewer, more = models(changes)
    measured, predicted = (
        rule(more, dtype, policy, documents=documents) - rule(fewer, dtype, policy, documents=documents)
        for rule in (kept_by_forward, estimated)
    )
    return measured, predicted


BUILT = {name: changes for name, changes in VARIANTS.items() if "dense_layers" not in changes.get("moe", {})}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", BUILT.values(), ids=BUILT)
def test_a_block_keeps_what_is_listed(changes: dict[str, Any], dtype: torch.dtype, request: Any) -> None:
    name = next(name for name, one in BUILT.items() if one is changes)
    for policy in POLICIES:
        measured, predicted = compared(changes, dtype, policy, documents=False)
        if name in ABOVE:
            assert measured * 0.99 <= predicted <= 1.1 * measured, policy
        elif name in ABOUT:
            assert predicted == pytest.approx(measured, rel=0.01, abs=32), policy
        else:
            assert predicted == measured, policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_table_of_documents_is_kept_as_numbers_by_kernels_alone(dtype: torch.dtype) -> None:
    measured, predicted = compared({}, dtype, "none", documents=True)
    without, _ = compared({}, dtype, "none", documents=False)
    assert measured == predicted
    assert measured - without == (SEQUENCES * LENGTH**2 * 4 if dtype == torch.float32 else 0)
