"""Steps of tiny models with matrices and sequences split over ranks, and the same steps in one
process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamWConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.packed_windows import PADDING
from llmsys.engine.engine import Engine, reduce_token_counts
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import ActivationCheckpointMode
from llmsys.parallel.block_wrapping import wrap_blocks
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.dtensor_slices import get_local_slice
from llmsys.parallel.fp8 import convert_experts_to_fp8, convert_to_fp8
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.model_choices import ARCHITECTURES, LATENT
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)

ROWS, LENGTH = 4, 16
LOSS = LossConfig(label_smoothing=0.1, z_loss=0.01)
FIRST_BETA = 0.9
# One assignment per token, and the bias that decides: all tokens on one expert, none on the others.
ONE_EXPERT: dict[str, Any] = {
    "num_experts_per_tok": 1,
    "score": "sigmoid",
    "balance": {"kind": "bias"},
}
DEEPSEEK: dict[str, Any] = {
    "score": "sigmoid",
    "balance": {"kind": "bias", "sequence_weight": 0.5},
    "num_shared_experts": 1,
    "first_dense_layers": 1,
    "z_loss_weight": 0.05,
}
EXPERTS: dict[str, ModelConfig] = {
    "experts, evenness over the batch": build_tiny_moe_config(
        {
            "balance": {"kind": "auxiliary_loss", "weight": 0.5},
            "shared_intermediate_size": 12,
            "shared_gate": True,
        }
    ),
    "experts, evenness of sequences": build_tiny_moe_config(
        {
            "balance": {"kind": "auxiliary_loss", "scope": "sequence", "weight": 0.5},
            "router_bias": True,
        }
    ),
    "experts, all tokens on one": build_tiny_moe_config(ONE_EXPERT),
    # Widths that two ranks split into blocks of 128. One layer: what one rounds differently is off
    # by 6 % in the next.
    "fp8, experts": build_tiny_moe_config(
        {"moe_intermediate_size": 128, "num_shared_experts": 2},
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
    ),
    "experts, latent attention, multi-token prediction": build_tiny_moe_config(
        DEEPSEEK,
        attention=LATENT,
        num_key_value_heads=4,
        multi_token_prediction={"depth": 2},
        tie_word_embeddings=True,
    ),
}
GATED_DELTA: dict[str, Any] = {
    "kind": "gated_delta",
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_head_dim": 6,
    "value_head_dim": 5,
    "chunk_length": 3,
}
KIMI: dict[str, Any] = {
    "kind": "kimi_delta",
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_head_dim": 6,
    "value_head_dim": 5,
    "decay_rank": 3,
    "gate_rank": 7,
    "chunk_length": 4,
}
MAMBA2: dict[str, Any] = {
    "kind": "mamba2",
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_head_dim": 5,
    "value_head_dim": 6,
    "chunk_length": 3,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_attention": GATED_DELTA,
}
GATED: dict[str, Any] = {"kind": "multi_head", "output_gate": True, "qkv_bias": True}
HYBRIDS: dict[str, ModelConfig] = {
    "gated attention": build_tiny_config(attention=GATED),
    "gated delta": build_tiny_config(attention=GATED, num_hidden_layers=3, **LINEAR),
    "mamba2": build_tiny_config(num_hidden_layers=3, **(LINEAR | {"linear_attention": MAMBA2})),
    "one sub-layer a layer, experts": build_tiny_moe_config(
        {"every": 4},
        num_hidden_layers=4,
        layer_types=["linear_attention", "feed_forward", "full_attention", "feed_forward"],
        feed_forward_layers=[False, True],
        linear_attention=MAMBA2 | {"min_step": 0.01},
    ),
    "attention alone": build_tiny_config(
        num_hidden_layers=4,
        layer_types=["full_attention", "feed_forward"],
        feed_forward_layers=[False, True],
        multipliers={"attention": {"k_proj": 0.5}, "feed_forward": {"gate_proj": 0.7}},
    ),
    "attention beside states": build_tiny_config(
        num_hidden_layers=2,
        layer_types=["hybrid"],
        linear_attention=MAMBA2 | {"output_norm": "none"},
        multipliers={"attention": {"o_proj": 0.5}, "linear_attention": {"g_proj": 0.7}},
    ),
    # Latents without positions in the layers between.
    "kimi delta, experts, latent attention": build_tiny_moe_config(
        DEEPSEEK,
        num_hidden_layers=3,
        attention=LATENT,
        num_key_value_heads=4,
        position={"kind": "none"},
        **(LINEAR | {"linear_attention": KIMI}),
    ),
    "kimi delta": build_tiny_config(num_hidden_layers=3, **(LINEAR | {"linear_attention": KIMI})),
    "gated delta, experts, multi-token prediction": build_tiny_moe_config(
        num_hidden_layers=3, multi_token_prediction={"depth": 1}, **LINEAR
    ),
}


def build_named_config(name: str) -> ModelConfig:
    """One of EXPERTS or HYBRIDS, or an architecture of choices.py."""
    named = EXPERTS | HYBRIDS
    return named[name] if name in named else build_tiny_config(**ARCHITECTURES[name])


def build_named_model(name: str) -> Transformer:
    """Weights in which nothing is 0 or 1 by chance."""
    model = build_tiny_model(build_named_config(name))
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            # Of the initial decays no state would live through a row.
            generator = torch.Generator().manual_seed(7)
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 4 - 9)
    if "all tokens on one" in name:
        for layer in model.list_moe_layers():
            layer.balance_bias_E.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    return model


def convert_named_model(name: str, model: Transformer, tensor_ranks: int = 1) -> None:
    """Make the layers and experts of a model named fp8 multiply in emulated fp8."""
    if "fp8" in name:
        convert_to_fp8(model, "fp8_block", tensor_ranks=tensor_ranks, emulate=True)
        convert_experts_to_fp8(model, "fp8_block", emulate=True)


def build_named_batch(name: str, first: int = 0, count: int = ROWS) -> Batch:
    """Rows of packed documents; two are padded, one of them for the most part, so that ranks
    have uneven work.
    """
    documents = [
        [0] * 5 + [1] * 11,
        [0] * 16,
        [0, 0, 1, 1, 1, 2, 2, 2, 2] + [PADDING] * 7,
        [0] * 3 + [PADDING] * 13,
    ]
    documents_BT = torch.tensor(documents)
    tokens_BT = build_tiny_tokens(ROWS, LENGTH + 1)
    targets_BT, tokens_BT = tokens_BT[:, 1:].clone(), tokens_BT[:, :-1].clone()
    targets_BT[documents_BT == PADDING] = IGNORED
    types_BT = None
    if "bert" in name:
        targets_BT = tokens_BT.where((tokens_BT % 3 == 0) & (documents_BT != PADDING), IGNORED)
        types_BT = (build_tiny_tokens(ROWS, LENGTH, 2, seed=5))[first : first + count]
    rows = slice(first, first + count)
    return Batch(
        tokens_BT[rows].clone(),
        targets_BT[rows].clone(),
        documents_BT[rows].clone(),
        token_types_BT=types_BT,
    )


def compute_plain_gradients(name: str) -> dict[str, Tensor]:
    """Loss, norm, counts of experts and every gradient of one process."""
    model, batch = build_named_model(name), build_named_batch(name)
    convert_named_model(name, model)
    model.train()
    counts = reduce_token_counts([batch], torch.device("cpu"))
    share, nats = compute_loss_share(model, model, batch, build_training_loss(LOSS), counts)
    share.backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([grad.square().sum() for grad in found.values()]).sum().sqrt()
    return found | {"loss": nats / counts[0], "norm": norm} | collect_reported_experts(model)


def collect_reported_experts(model: Transformer) -> dict[str, Tensor]:
    """What the step found out about experts."""
    report = update_expert_balance(model)
    return (
        {key: torch.tensor(value, dtype=torch.float32) for key, value in report.to_dict().items()}
        if report
        else {}
    )


def build_sharded_engine(
    name: str,
    layout: ParallelLayout,
    recompute: ActivationCheckpointMode = "none",
    compiled: str = "",
) -> Engine:
    """The torch engine with the weights of `model_named`, its blocks compiled by a backend of
    torch.compile.
    """
    from llmsys.engine.torch_engine import TorchEngine

    whole, device = build_named_model(name), torch.device("cpu")
    with torch.device("meta"):
        model = Transformer(whole.config)
    meshes = build_device_meshes(
        layout.resolve(torch.distributed.get_world_size(), whole.config), device
    )
    convert_named_model(name, model, layout.tensor)
    wrap_blocks(
        model,
        recompute,
        compiles=bool(compiled),
        tensor_ranks=meshes.layout.tensor,
        separates_experts=meshes.has_separate_experts,
        backend=compiled,
    )
    engine = TorchEngine(
        model,
        meshes=meshes,
        optimizer=AdamWConfig(max_grad_norm=0.0, betas=(FIRST_BETA, 0.95)),
        loss=build_training_loss(LOSS),
        compute_dtype=torch.float32,
        seed=0,
        device=device,
    )
    take(engine, {f"parameter/{key}": value for key, value in whole.named_parameters()})
    take(
        engine,
        {
            f"buffer/{key}": value
            for key, value in whole.state_dict().items()
            if key in dict(whole.named_buffers())
        },
    )
    return engine


@torch.no_grad()
def take(engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Write whole tensors into the living state."""
    tensors = engine.get_state().tensors
    for key, value in values.items():
        held = tensors[key]
        local = held.to_local() if hasattr(held, "to_local") else held
        local.copy_(get_local_slice(value, held))


def gather_sharded_gradients(
    rank: int, name: str, layout: ParallelLayout, recompute: ActivationCheckpointMode = "none"
) -> dict[str, Tensor]:
    """What `plain_gradients` gives, from a step of the engine."""
    return collect_gradients(rank, build_sharded_engine(name, layout, recompute), name, layout)


def collect_gradients(
    rank: int, engine: Engine, name: str, layout: ParallelLayout
) -> dict[str, Tensor]:
    """The numbers and gradients of a first step of an engine: Adam's first moment has a tenth of
    the gradient.
    """
    fitted = layout.resolve(torch.distributed.get_world_size(), engine.module.config)
    rows = ROWS // fitted.data_parallel_size
    result = engine.train_step(
        [build_named_batch(name, fitted.get_data_rank(rank) * rows, rows)], 1e-3
    )
    found = {
        "loss": torch.tensor(result.loss),
        "norm": torch.tensor(result.gradient_norm),
    } | collect_reported_experts(engine.module)
    for key, tensor in engine.get_state().tensors.items():
        if key.startswith("first_moment/"):
            found[key.removeprefix("first_moment/")] = gather_full_tensor(tensor) / (1 - FIRST_BETA)
    return found


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """A tensor of the state, gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_gradients(
    case: Any, found: Mapping[str, Any], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Check what `gather_sharded_gradients` found, as arrays, against `compute_plain_gradients`."""
    assert found.keys() == expected.keys(), case
    largest = max(float(value.norm()) for value in expected.values())
    for key, value in expected.items():
        ours = torch.from_numpy(found[key])
        error = compute_relative_error(ours, value)
        assert error < tolerance or float((ours - value).norm()) < 1e-7 * largest, (
            f"{case}: {key} is off by {error:.1e}"
        )


def all_gradients(rank: int, cases: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Many cases in one set of processes; numpy, because tensors would travel through shared
    memory.
    """
    found = [gather_sharded_gradients(rank, *case) for case in cases]
    return (
        [{key: value.numpy() for key, value in one.items()} for one in found] if rank == 0 else []
    )
