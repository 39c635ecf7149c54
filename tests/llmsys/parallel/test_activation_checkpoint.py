"""Recomputation changes what stays in memory and not one bit of losses, gradients and what is
counted.
"""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from llmsys.config.model import ModelConfig
from llmsys.model import varlen_attention
from llmsys.model.transformer import Transformer
from llmsys.parallel import activation_checkpoint, activation_offload
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from llmsys.parallel.block_compilation import compile_blocks
from tests.helpers.live_memory import measure_kept_bytes
from tests.helpers.model_sections import EVERY_HEAD, LATENT, MOE, SHAPE, VARIANTS
from tests.helpers.pretended_accelerator import pretend_accelerator
from tests.helpers.tiny_model import build_tiny_model, build_tiny_tokens

What = Literal["none", "selective", "full", "offload"]
DROPOUT = {
    "dropout": {
        "residual": 0.1,
        "attention": 0.2,
        "activation": 0.1,
        "embedding": 0.1,
        "final": 0.1,
    }
}
NAMES = [
    "dense", "sinks", "sandwich, capped, windows", "multi-query, parallel", "deepnorm",
    "transformer-xl",
    "relative bias", "latent", "gated shared expert of its own width", "expert and router biases",
    "experts balanced by a loss", "predicts further with experts and latents", "classifier",
    "original",
    "relative bias in both stacks", "experts in the decoder",
]  # fmt: skip
CASES = {name: VARIANTS[name] for name in NAMES} | {
    "choosers": {
        "moe": MOE
        | {"routing": {"kind": "expert_choice", "factor": 1.3}, "balance": {"kind": "none"}}
    },
    "drops and draws": {
        "moe": MOE | {"routing": {"kind": "capacity", "factor": 0.7}, "score": "sparsemixer"}
    },
}


def step(model: Transformer) -> dict[str, Tensor]:
    """One forward and backward with two documents and padding: loss, gradients, and every
    buffer.
    """
    for module in model.modules():
        module._buffers.update(
            {name: b if b is None else b.float() for name, b in module._buffers.items()}
        )
    torch.manual_seed(3)
    documents_BT = torch.tensor([[0] * 4 + [1] * 3 + [-1] * 2] * 2)
    source: dict[str, Tensor] = {}
    if model.config.family == "encoder_decoder":
        source = {
            "source_BS": build_tiny_tokens(2, 11, 30),
            "source_documents_BS": torch.tensor([[0] * 5 + [1] * 6] * 2),
        }
    output = model.train()(build_tiny_tokens(2, 9), documents_BT=documents_BT, **source)
    loss = model.compute_auxiliary_loss()
    for index, logits in enumerate([output, *model.predicted]):
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(index))
        loss = loss + (logits.float() * weights).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return (
        gradients
        | {f"buffer {name}": b for name, b in model.named_buffers()}
        | {"loss": loss.detach()}
    )


def prepared(
    config: ModelConfig, what: What, dtype: torch.dtype, compiled: bool = False
) -> Transformer:
    model = build_tiny_model(config).to(dtype)
    apply_activation_checkpoint(model, what, compiled=compiled)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, backend="aot_eager")
    return model


@pytest.fixture(autouse=True)
def offload_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)


def assert_same_bits(config: ModelConfig, dtype: torch.dtype, compiled: bool = False) -> None:
    expected = step(prepared(config, "none", dtype, compiled))
    whats: tuple[What, ...] = (
        ("selective", "full") if compiled else ("selective", "full", "offload")
    )
    for what in whats:
        found = step(prepared(config, what, dtype, compiled))
        assert found.keys() == expected.keys()
        differing = [
            name for name, value in expected.items() if not torch.equal(found[name], value)
        ]
        assert not differing, (what, differing)


@pytest.mark.parametrize(
    ("dtype", "dropout"),
    [(torch.float32, {}), (torch.bfloat16, DROPOUT)],
    ids=["fp32", "bf16 with dropout"],
)
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_counts_are_the_same_bits(
    name: str, dtype: torch.dtype, dropout: dict[str, Any]
) -> None:
    assert_same_bits(ModelConfig.model_validate(SHAPE | CASES[name] | dropout), dtype)


@pytest.mark.parametrize(
    "name", ["dense", "sinks", "sandwich, capped, windows", "relative bias", "latent", "original"]
)
def test_kernels_of_accelerators_recompute_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_accelerator(monkeypatch, exact=True)
    assert_same_bits(
        ModelConfig.model_validate(SHAPE | {"head_dim": 8} | CASES[name]), torch.float32
    )


def test_compiled_functions_run_compiled_under_selective_checkpointing() -> None:
    """torch runs them eagerly under other dispatch modes: flex_attention would make its scores,
    without a word.
    """
    compiled_graphs: list[Any] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=compile_graph)
    for context in activation_checkpoint.build_eager_contexts(
        activation_checkpoint.SAVED_OPERATIONS
    )():
        torch._dynamo.reset()
        compiled_graphs.clear()
        with context, _disable_current_modes():
            double(torch.ones(3))
        assert len(compiled_graphs) == 1


@pytest.mark.parametrize(
    "changes",
    [
        DROPOUT,
        {"moe": MOE | {"balance": {"kind": "auxiliary_loss", "weight": 0.5}}},
        CASES["drops and draws"],
    ],
    ids=["dense", "moe", "experts with capacity, in pieces"],
)
def test_compiled_blocks_recompute_the_same_bits(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | {"num_hidden_layers": 2} | changes)
    assert_same_bits(config, torch.bfloat16 if config.moe is None else torch.float32, compiled=True)


WIDE = SHAPE | {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4}


def kept_bytes(config: ModelConfig, what: What, dtype: torch.dtype) -> int:
    model = prepared(config, what, dtype).train()
    tokens = build_tiny_tokens(4, 48)
    return measure_kept_bytes(
        lambda: model(tokens, finish=lambda head, x_BTD, places: x_BTD), *model.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes", [{}, {"moe": MOE}, {**EVERY_HEAD, "attention": LATENT}], ids=["dense", "moe", "mla"]
)
def test_each_step_keeps_less(changes: dict[str, Any], dtype: torch.dtype) -> None:
    config = ModelConfig.model_validate(WIDE | changes)
    everything, some, entering = (
        kept_bytes(config, what, dtype) for what in ("none", "selective", "full")
    )
    width = torch.finfo(dtype).bits // 8
    assert entering < 0.25 * some < 0.25 * 0.8 * everything
    # What enters four blocks, what leaves the last, the final norm, masks, and the rotation's
    # angles.
    assert entering < 4 * 48 * 32 * width * 8 + 48 * 48 * 4 + 4 * 64 * 8 * 4


def calls(config: ModelConfig, what: What, operations: set[Any]) -> tuple[int, int]:
    """How often some operations run in the forward, and then in the backward."""
    model, counts = prepared(config, what, torch.bfloat16).train(), [0]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts[-1] += func in operations
            return func(*args, **(kwargs or {}))

    with Count():
        loss = model(build_tiny_tokens(2, 8)).float().square().sum()
        counts.append(0)
        loss.backward()
    return counts[0], counts[1]


@pytest.mark.parametrize(
    "changes", [{}, {"moe": MOE | {"num_shared_experts": 1}}], ids=["dense", "moe"]
)
def test_selective_repeats_neither_products_nor_attention(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | changes)
    forward, backward = calls(config, "none", activation_checkpoint.SAVED_OPERATIONS)
    assert calls(config, "selective", activation_checkpoint.SAVED_OPERATIONS) == (forward, backward)
    assert calls(config, "full", activation_checkpoint.SAVED_OPERATIONS)[1] > backward


def test_selective_does_not_repeat_packed_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch)
    config, operations = (
        ModelConfig.model_validate(SHAPE | {"head_dim": 8, "sliding_window": 4}),
        {varlen_attention.OPERATION},
    )
    assert calls(config, "none", operations) == (config.num_hidden_layers, 0)
    assert calls(config, "selective", operations) == (config.num_hidden_layers, 0)
    assert calls(config, "full", operations) == (config.num_hidden_layers, config.num_hidden_layers)


def test_nothing_is_wrapped_around_a_forward_without_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*inputs: Any, **named: Any) -> None:
        raise AssertionError("checkpointed")

    monkeypatch.setattr(activation_checkpoint, "checkpoint", refuse)
    model = prepared(ModelConfig.model_validate(SHAPE), "selective", torch.float32)
    with torch.no_grad():
        model(build_tiny_tokens())
    with pytest.raises(AssertionError, match="checkpointed"):
        model(build_tiny_tokens())
