"""Measure the bytes that one more block saves for backward, and estimate the same."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from llmsys.config.model import ModelConfig
from llmsys.config.objective import PermutationConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import build_activation_shape, iter_block_groups
from llmsys.estimate.memory_timeline import compute_saved_bytes
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import (
    ActivationCheckpointMode,
    apply_activation_checkpoint,
)
from tests.helpers.live_memory import measure_kept_bytes
from tests.helpers.model_sections import SHAPE

SEQUENCES, LENGTH, SOURCE = 2, 16, 24
ON_CPU = MemoryProfile(device="cpu")


def build_model_pair(changes: dict[str, Any]) -> tuple[ModelConfig, ModelConfig]:
    """The model, and the same with one more block of each kind."""
    base = SHAPE | changes
    period = 2 if "layer_types" in base or "every" in base.get("moe", {}) else 1
    period = max(
        period, *(len(base.get(key, ())) for key in ("layer_types", "feed_forward_layers"))
    )
    fewer = max(2, period)
    return build_with_layers(base, fewer), build_with_layers(base, fewer + period)


def build_with_layers(base: dict[str, Any], layers: int) -> ModelConfig:
    stacks: dict[str, Any] = {"num_hidden_layers": layers}
    if "value_layers" in (embedding := base.get("embedding", {})):
        stacks["embedding"] = embedding | {"value_layers": list(range(layers))}
    if "encoder" in base:
        stacks["encoder"] = base["encoder"] | stacks
    return ModelConfig.model_validate(base | stacks)


@cache
def measure_saved_bytes(
    model: ModelConfig, dtype: torch.dtype, policy: ActivationCheckpointMode, *, documents: bool
) -> int:
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
    if model.head.kind == "permutation":
        predicted = PermutationConfig().count_predicted(LENGTH)
        inputs["predicted_BP"] = torch.arange(1, predicted + 1).expand(SEQUENCES, -1)
    tokens_BT = torch.randint(0, model.vocab_size, (SEQUENCES, LENGTH))

    def forward() -> torch.Tensor:
        given: torch.Tensor = module(
            tokens_BT, finish=lambda head, hidden, places: hidden, **inputs
        )
        return given

    forward()  # tables of rotations are there from now on
    return measure_kept_bytes(forward, *module.parameters(), *module.buffers())


def estimate_saved_bytes(
    model: ModelConfig, dtype: torch.dtype, policy: ActivationCheckpointMode, *, documents: bool
) -> int:
    pairs = model.family == "encoder_decoder"
    batch: dict[str, Any] = {
        "sequence_length": SOURCE if pairs else LENGTH,
        "sequences": SEQUENCES,
    } | ({"target_sequence_length": LENGTH} if pairs else {})
    batch |= {"attention_scope": "window"} if model.mixes_documents else {}
    config = RunConfig.model_validate(
        {
            "model": model,
            "batch": batch,
            "train": {
                "precision": "bf16" if dtype == torch.bfloat16 else "fp32",
                "activation_checkpoint": policy,
            },
        }
    )
    extent = build_activation_shape(config, ParallelLayout(shard=1), ON_CPU)
    extent = replace(extent, has_documents=extent.has_documents and documents)
    kinds = iter_block_groups(config, extent)
    return sum(
        len(kind.layers) * compute_saved_bytes(kind.saved_tensors, policy, False, ON_CPU)
        for kind in kinds
    )


def compare_saved_bytes(
    changes: dict[str, Any],
    dtype: torch.dtype,
    policy: ActivationCheckpointMode,
    *,
    documents: bool,
) -> tuple[int, int]:
    fewer, more = build_model_pair(changes)
    measured, predicted = (
        rule(more, dtype, policy, documents=documents)
        - rule(fewer, dtype, policy, documents=documents)
        for rule in (measure_saved_bytes, estimate_saved_bytes)
    )
    return measured, predicted
