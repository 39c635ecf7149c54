"""The decision table of attention: the kernel of each feature on each device, and what a missing
one costs.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmsys.config.attention_device import AttentionDevice
from llmsys.config.loading.load import load_run_config
from llmsys.config.long_attention import LongformerAttentionConfig
from llmsys.kernels.attention_kernel import AttentionTraits, KernelName, choose_attention_kernel
from llmsys.kernels.attention_layers import describe_self_attention, list_attention_groups
from llmsys.model import cpu_attention, scaled_dot_product
from llmsys.model.transformer import Transformer
from tests.helpers.model_choices import DECODERS
from tests.helpers.tiny_model import build_tiny_config, build_tiny_tokens

CPU = AttentionDevice("cpu")
AMPERE, ADA, HOPPER, BLACKWELL = (
    AttentionDevice("cuda", one) for one in ((8, 0), (8, 9), (9, 0), (10, 0))
)
VOLTA, APPLE, AMD = AttentionDevice("cuda", (7, 0)), AttentionDevice("mps"), AttentionDevice("hip")
USUAL = AttentionTraits("bf16", 128, 128, 4096)
CHANGES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"mask": "bidirectional"},
    "documents": {"has_documents": True},
    "window": {"has_window": True},
    "bidirectional window": {"mask": "bidirectional", "has_window": True},
    "prefix": {"mask": "prefix"},
    "source": {"mask": "cross"},
    "padded source": {"mask": "cross", "has_documents": True},
    "sinks": {"has_sinks": True},
    "soft cap": {"has_softcap": True},
    "alibi": {"bias": "alibi"},
    "relative bias": {"bias": "relative"},
    "mla": {"qk_width": 192},
    "wide": {"qk_width": 512, "v_width": 512},
    "odd width": {"qk_width": 100, "v_width": 100},
    "fp32": {"dtype": "fp32"},
    "transformer-xl": {"has_distance_scores": True},
    "dropout": {"drops_weights": True},
    "dropout, documents": {"drops_weights": True, "has_documents": True},
    "dropout, sinks": {"drops_weights": True, "has_sinks": True},
    "long": {"length": 4096},
    "short": {"length": 2048},
    "short, own scale": {"length": 2048, "has_usual_scale": False},
}
# On accelerators, on CPUs.
KERNELS: dict[str, tuple[KernelName, KernelName]] = {
    "causal": ("sdpa", "sdpa"),
    "bidirectional": ("sdpa", "sdpa"),
    "documents": ("varlen", "sdpa"),
    "window": ("varlen", "sdpa"),
    "bidirectional window": ("flex", "sdpa"),
    "prefix": ("flex", "sdpa"),
    "source": ("sdpa", "sdpa"),
    "padded source": ("flex", "sdpa"),
    "sinks": ("varlen", "eager"),
    "soft cap": ("flex", "eager"),
    "alibi": ("flex", "sdpa"),
    "relative bias": ("flex", "sdpa"),
    "mla": ("varlen", "sdpa"),
    "wide": ("flex", "sdpa"),
    "odd width": ("flex", "sdpa"),
    "fp32": ("flex", "sdpa"),
    "transformer-xl": ("sdpa", "sdpa"),
    "dropout": ("sdpa", "eager"),
    "dropout, documents": ("sdpa", "eager"),
    "dropout, sinks": ("eager", "eager"),
    "long": ("sdpa", "sdpa"),
    "short": ("sdpa", "chunked"),
    "short, own scale": ("sdpa", "sdpa"),
}
WITH_TABLE = {"transformer-xl", "dropout, documents", "dropout, sinks"}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("device", [AMPERE, HOPPER, BLACKWELL], ids=str)
def test_accelerators_take_the_fastest_kernel_that_is_exact(
    device: AttentionDevice, name: str
) -> None:
    choice = choose_attention_kernel(device, replace(USUAL, **CHANGES[name]))
    assert choice.kernel == KERNELS[name][0]
    assert choice.has_table == (name in WITH_TABLE)
    # Whoever does not get the first choice learns why, and the price.
    assert bool(choice.cost) == (choice.preferred is not None)
    assert choice.preferred != choice.kernel
    assert choice.reason


@pytest.mark.parametrize("name", CHANGES)
def test_cpus_take_the_kernels_that_they_have(name: str) -> None:
    assert choose_attention_kernel(CPU, replace(USUAL, **CHANGES[name])).kernel == KERNELS[name][1]


@pytest.mark.parametrize("device", [VOLTA, APPLE, AMD, AttentionDevice("cuda")], ids=str)
def test_a_device_that_kernels_do_not_know_takes_tables_and_is_named(
    device: AttentionDevice,
) -> None:
    choice = choose_attention_kernel(device, replace(USUAL, has_documents=True))
    assert (choice.kernel, choice.has_table, choice.preferred) == ("sdpa", True, "varlen")
    assert choice.reason == f"flash and flex attention are not known to run on {device}"
    assert (
        choice.cost == "a table of length² = 32 MiB per sequence, and every hidden pair is computed"
    )
    plain = choose_attention_kernel(device, USUAL)
    assert (plain.kernel, plain.has_table) == ("sdpa", False)
    capped = choose_attention_kernel(device, replace(USUAL, has_softcap=True))
    assert (capped.kernel, capped.cost) == (
        "eager",
        "scores of length² = 64 MiB per head and sequence in fp32, several times",
    )


def test_the_cost_of_flex_names_padding_and_precision() -> None:
    latent = choose_attention_kernel(
        HOPPER, replace(USUAL, qk_width=192, has_documents=True, has_softcap=True)
    )
    assert latent.reason == "flash attention has one width for keys and values, not 192 and 128"
    assert "1.20 × the FLOPs" in latent.cost
    assert "fp32 products" in choose_attention_kernel(HOPPER, replace(USUAL, dtype="fp32")).cost


def test_keys_wider_than_values_take_the_kernel_of_llmsys_where_it_can_split_them() -> None:
    latent = replace(USUAL, qk_width=192, v_width=128, has_documents=True)
    choice = choose_attention_kernel(HOPPER, latent)
    assert (choice.kernel, choice.preferred, choice.cost) == ("varlen", None, "")
    assert choice.reason == (
        "causal, documents: flash attention has one width for keys and values, not 192 and 128; "
        "Triton kernel of llmsys, keys in parts of 128 and 64 channels"
    )
    others: list[dict[str, Any]] = [
        {"dtype": "fp32"}, {"has_window": True}, {"has_softcap": True}, {"qk_width": 200},
        {"v_width": 96},
        {"qk_width": 136, "v_width": 64}, {"qk_width": 384, "v_width": 256},
    ]  # fmt: skip
    assert {choose_attention_kernel(HOPPER, replace(latent, **one)).kernel for one in others} == {
        "flex"
    }
    devices = AMPERE, ADA, BLACKWELL, AMD
    chosen = [choose_attention_kernel(device, latent).kernel for device in devices]
    assert chosen == ["varlen", "flex", "varlen", "sdpa"]
    dropped = choose_attention_kernel(
        HOPPER, replace(latent, has_documents=False, drops_weights=True)
    )
    assert (dropped.kernel, dropped.has_table) == ("sdpa", False)


def test_wide_heads_train_where_the_backward_has_the_memory() -> None:
    wide = replace(USUAL, qk_width=256, v_width=256, has_documents=True)
    assert [choose_attention_kernel(device, wide).kernel for device in (AMPERE, ADA)] == [
        "varlen",
        "flex",
    ]
    assert choose_attention_kernel(ADA, replace(wide, is_training=False)).kernel == "varlen"


def test_generation_reads_a_row_for_each_new_token() -> None:
    cached = replace(USUAL, is_cached=True, is_training=False)
    assert choose_attention_kernel(HOPPER, cached).has_table is False
    assert choose_attention_kernel(HOPPER, replace(cached, has_documents=True)).has_table is True
    assert (
        choose_attention_kernel(HOPPER, replace(cached, qk_width=576, v_width=512)).kernel == "sdpa"
    )


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_runs_what_the_table_says(name: str, dtype: torch.dtype) -> None:
    config = build_tiny_config(**DECODERS[name])
    model, documents_BT = (
        Transformer(config).to(dtype).train(),
        torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]),
    )
    ran: list[str] = []

    def record(kernel: str, function: Any) -> Any:
        def call(*inputs: Any, **named: Any) -> Any:
            ran.append(kernel)
            return function(*inputs, **named)

        return call

    with (
        patch.object(
            cpu_attention,
            "compute_chunked_attention",
            record("chunked", cpu_attention.compute_chunked_attention),
        ),
        patch.object(
            scaled_dot_product,
            "compute_eager_attention",
            record("eager", scaled_dot_product.compute_eager_attention),
        ),
        patch.object(
            torch.nn.functional,
            "scaled_dot_product_attention",
            record("sdpa", torch.nn.functional.scaled_dot_product_attention),
        ),
    ):
        model(build_tiny_tokens(1, 8), documents_BT=documents_BT)
    named = "fp32" if dtype == torch.float32 else "bf16"
    wanted = [
        choose_attention_kernel(
            CPU,
            describe_self_attention(
                config,
                config.get_layer_type(i),
                dtype=named,  # type: ignore[arg-type]
                length=8,
                has_documents=True,
            ),
        ).kernel
        for i in range(config.num_hidden_layers)
    ]
    calls = (
        len(set(config.attention.dilations))
        if isinstance(config.attention, LongformerAttentionConfig)
        else 1
    )
    assert ran == [kernel for kernel in wanted for _ in range(calls)]


def test_groups_of_a_run_are_its_stacks_and_layer_types() -> None:
    pairs = list_attention_groups(load_run_config("train/multi30k"), HOPPER)
    assert [(one.stack, one.attention, one.choice.kernel) for one in pairs] == [
        ("encoder", "full_attention", "varlen"),
        ("decoder", "full_attention", "sdpa"),
        ("decoder", "cross_attention", "flex"),
    ]
    capped = load_run_config(
        "train/demo",
        ["model.sliding_window=64", "model.layer_types=[sliding_attention, full_attention]"],
    )
    assert [one.layers for one in list_attention_groups(capped, HOPPER)] == [(0, 2), (1, 3)]
    whole = load_run_config("train/demo", ["batch.attention_scope=window"])
    assert [one.choice.kernel for one in list_attention_groups(whole, HOPPER)] == ["sdpa"]
