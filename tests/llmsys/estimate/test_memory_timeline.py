"""The ledger of a rank: its verdict on a device, and how it answers to changes of a config."""

from dataclasses import replace
from typing import Any

import pytest

from llmsys.config.loading.load import load_model_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import build_activation_shape, iter_block_groups
from llmsys.estimate.memory_timeline import (
    CHEAP_OUTPUTS,
    GIB,
    LINEAR_INPUTS,
    UP_PROJECTIONS,
    MemorySnapshot,
    MemoryTimeline,
    select_saved_tensors,
)
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.program_profile import load_program_profile
from llmsys.estimate.run_estimate import estimate_run
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import compute_state_bytes
from llmsys.estimate.summary_table import format_estimate
from tools.bench.fits.korthikanti import iter_analytical_rows

LLAMA = load_model_config("model/llama3.1-8b")
NAMES = [
    "between steps",
    "at the start of forward",
    "before the last block",
    "at the end of forward",
    "in the loss",
    "in the backward of the last block",
    "in the backward of the second block",
    "in the backward of the first block",
    "at the end of backward",
    "in the optimizer step",
    "while a checkpoint is written",
    "in an evaluation",
]


def run_of(**sections: Any) -> RunConfig:
    batch = {"sequence_length": 8192, "sequences": 16, "attention_scope": "window"} | sections.pop(
        "batch", {}
    )
    train = {"precision": "bf16"} | sections.pop("train", {})
    settings = {"model": LLAMA, "batch": batch, "train": train, "layout": {"shard": 8}}
    return RunConfig.model_validate(settings | sections)


def ledger_of(system: MemoryProfile | None = None, **sections: Any) -> MemoryTimeline:
    config = run_of(**sections)
    return estimate_peak_memory(config, config.layout, system=system or MemoryProfile())


def find_instant(ledger: MemoryTimeline, name: str) -> MemorySnapshot:
    return next(one for one in ledger.instants if one.name == name)


def test_instants_are_named_in_their_order_and_the_peak_is_the_fullest() -> None:
    ledger = ledger_of()
    assert [instant.name for instant in ledger.instants] == NAMES
    assert ledger.peak_bytes == max(
        sum(item.bytes for item in instant.items) for instant in ledger.instants
    )
    assert (
        ledger.list_largest_items(2)
        == sorted(ledger.peak.items, key=lambda item: item.bytes, reverse=True)[:2]
    )


def test_a_verdict_says_where_memory_runs_out_and_what_saves_how_much() -> None:
    whole = MemoryProfile(loss="whole")
    ledger = ledger_of(whole, train={"activation_checkpoint": "selective"})
    found = ledger.compute_fit_result(80 * GIB)
    chunked = ledger_of(train={"activation_checkpoint": "selective"})
    saved = (ledger.peak_bytes - chunked.peak_bytes) / GIB
    assert not found.fits
    assert found.spare_bytes == 80 * GIB - ledger.driver_bytes - ledger.peak_bytes
    assert found.text.startswith("rank 0 runs out in the loss: ")
    assert f"chunking the loss saves {saved:.1f} GiB" in found.text
    assert ledger.compute_fit_result(141 * GIB).text.startswith("rank 0 fits: ")


def test_a_model_beyond_any_change_is_said_to_need_more_ranks() -> None:
    config = run_of(
        layout={"shard": 1}, train={"activation_checkpoint": "full"}, batch={"sequences": 1}
    )
    host = config.model_copy(
        update={"engine": config.engine.model_copy(update={"cpu_offload": "state"})}
    )
    text = estimate_peak_memory(host, host.layout).compute_fit_result(2 * GIB).text
    assert (
        "No single change of activation checkpointing, micro-batch, sharding or offload reduces "
        "it; use more ranks."
    ) in text


def test_each_policy_keeps_less_than_the_one_before() -> None:
    peaks = [
        ledger_of(train={"activation_checkpoint": policy}).peak_bytes
        for policy in ("none", "selective", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_each_stage_of_zero_splits_more() -> None:
    states = [
        ledger_of(engine={"kind": "deepspeed", "zero_stage": stage}).instants[-3].bytes
        for stage in (0, 1, 2, 3)
    ]
    assert states == sorted(states, reverse=True)


def test_copies_are_advised_to_become_shards() -> None:
    ddp = {"kind": "torch", "data_parallel": "ddp"}
    config = run_of(
        engine=ddp,
        layout={"replicate": 8, "shard": 1},
        train={"activation_checkpoint": "full"},
        batch={"sequences": 8},
    )
    text = estimate_peak_memory(config, config.layout).compute_fit_result(80 * GIB).text
    assert "engine.data_parallel=fsdp with layout.replicate=1 and layout.shard=8 saves" in text


@pytest.mark.parametrize(
    "engine",
    [{"kind": "torch", "cpu_offload": "state"}, {"kind": "deepspeed", "cpu_offload": "optimizer"}],
)
def test_offload_leaves_no_moments_on_the_device(engine: dict[str, str]) -> None:
    names = {item.name for instant in ledger_of(engine=engine).instants for item in instant.items}
    assert names.isdisjoint({"masters", "moments", "gradients"})


@pytest.mark.parametrize(
    "engine", [{"kind": "torch", "data_parallel": "ddp"}, {"kind": "accelerate"}]
)
def test_copies_are_whole_on_every_rank(engine: dict[str, str]) -> None:
    config = run_of(engine=engine, layout={"replicate": 8, "shard": 1})
    parameters = estimate_run(config).parameters.total
    optimizer = next(
        one
        for one in estimate_peak_memory(config, config.layout).instants
        if one.name == "in the optimizer step"
    )
    sizes = {item.name: item.bytes / parameters for item in optimizer.items}
    assert (
        sizes["masters"],
        sizes["moments"],
        sizes["gradients"],
        sizes["buckets of gradients"],
    ) == (4, 8, 4, 4)


def test_muon_has_one_moment_for_the_matrices_of_blocks() -> None:
    adam, muon = (ledger_of(optimizer={"kind": kind}).instants[0] for kind in ("adamw", "muon"))
    moments = [
        next(item.bytes for item in one.items if item.name == "moments") for one in (adam, muon)
    ]
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert moments[0] - moments[1] == 4 * matrices // 8


def test_ranks_that_share_a_sequence_share_its_activations() -> None:
    alone, context, tensor = (
        {
            item.name: item.bytes
            for item in find_instant(
                estimate_peak_memory(run_of(), layout), "at the end of forward"
            ).items
        }
        for layout in (
            ParallelLayout(shard=8),
            ParallelLayout(shard=8, context=2),
            ParallelLayout(shard=8, tensor=2),
        )
    )
    kept = "activations saved by blocks"
    assert context[kept] == alone[kept] // 2
    assert alone[kept] // 2 < tensor[kept] < alone[kept]  # what products read is gathered


def test_the_estimate_tells_the_peak_with_stable_keys() -> None:
    result = estimate_run(run_of())
    memory = result.memory
    assert memory is not None
    assert memory.peak_bytes == ledger_of().peak_bytes
    assert memory.peak_instant in NAMES
    assert [one.name for one in memory.instants] == NAMES
    assert all(one.bytes == sum(one.items.values()) for one in memory.instants)
    assert f"bytes on a GPU, {memory.peak_instant}" in format_estimate(result)


def test_a_published_run_out_of_memory_is_foretold() -> None:
    """Qwen2 7B on two tensor ranks with windows of 10,240 tokens ran out of 80 GB
    (verl_megatron_practice).
    """
    model = load_model_config("model/qwen2.5-7b")
    config = RunConfig.model_validate(
        {
            "model": model,
            "batch": {"sequence_length": 10_240, "sequences": 1, "attention_scope": "window"},
            "engine": {"kind": "deepspeed", "zero_stage": 1},
            "train": {"precision": "bf16"},
        }
    )
    program = MemoryProfile(
        evaluation="none", masks="none", loss="whole", head="columns", gathered="again"
    )
    ledger = estimate_peak_memory(config, ParallelLayout(shard=1, tensor=2), system=program)
    assert not ledger.compute_fit_result(80 * 10**9).fits


def test_what_megatron_keeps_is_counted_as_its_paper_does() -> None:
    for what, paper, ours in iter_analytical_rows():
        assert ours == pytest.approx(paper, rel=0.012), what


def test_fsdp_gathers_by_moments() -> None:
    """Buffers and copies in the forward, one buffer in the loss, nothing while root gradients
    are reduced.
    """
    config = run_of(train={"activation_checkpoint": "full"}, batch={"micro_sequences": 1})
    ledger = estimate_peak_memory(config, config.layout, system=MemoryProfile(measured="allocated"))
    root, block = 2 * 2 * 128_256 * 4096, 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    expected = {
        "at the start of forward": (2 * root, 2 * block),
        "before the last block": (root, 3 * block),
        "at the end of forward": (root, 2 * block),
        "in the loss": (root, block),
        "in the backward of the last block": (root, 2 * block),
        "in the backward of the first block": (root, block),
        "at the end of backward": (0, 0),
    }
    for name, (outside, blocks) in expected.items():
        items = {item.name: item.bytes for item in find_instant(ledger, name).items}
        assert items.get("gathered weights outside of blocks", 0) == pytest.approx(
            outside, rel=1e-3
        ), name
        assert items.get("gathered weights of blocks", 0) == pytest.approx(blocks, rel=1e-3), name


def test_gradients_of_weights_appear_while_activations_are_freed() -> None:
    """The peak of a block's backward is less than all of its tensors and all of its gradients
    together.
    """
    config = run_of(train={"activation_checkpoint": "full"}, batch={"micro_sequences": 1})
    ledger = estimate_peak_memory(config, config.layout, system=MemoryProfile(measured="allocated"))
    items = {
        item.name: item.bytes
        for item in find_instant(ledger, "in the backward of the last block").items
    }
    down = 2 * 4096 * 14_336  # the first product of the backward
    assert items["gradients in the compute dtype"] == down
    assert items["recomputed block"] > 5 * down


def build_deepseek_run(**train: str) -> RunConfig:
    batch = {
        "sequence_length": 4096,
        "sequences": 64,
        "micro_sequences": 1,
        "attention_scope": "window",
    }
    settings = {
        "model": load_model_config("model/deepseek-v3"),
        "batch": batch,
        "train": {"precision": "bf16"} | train,
    }
    return RunConfig.model_validate(settings)


def list_saved_tensors(
    config: RunConfig, layout: ParallelLayout, system: MemoryProfile
) -> dict[str, int]:
    *_, mixture = iter_block_groups(config, build_activation_shape(config, layout, system))
    return {
        one.name: one.bytes
        for one in select_saved_tensors(mixture.saved_tensors, "none", False, system)
    }


def test_a_layer_keeps_what_deepseek_v3_describes() -> None:
    """Section 3.2.3: norms and up-projections are computed again. 3.3.3: inputs of linear layers
    in 8 bits.
    """
    layout, tokens, fp8, e5m6 = ParallelLayout(shard=1, expert=64), 4096, 1 + 4 / 128, 1.5 + 4 / 128
    system = load_program_profile("hai-llm-v3").build_memory_profile(16)
    kept = list_saved_tensors(build_deepseek_run(), layout, system)
    per_token = {
        "block input": 2 * 7168,
        "query latent": 2 * 1536,
        "key-value latent": 2 * (512 + 64),
        "logsumexp": 4 * 128,
        "attention output": e5m6 * 128 * 128,
        "stream before feed_forward": 2 * 7168,
        "sorted visits": fp8 * 8 * 7168,
        "gate of experts": fp8 * 8 * 2048,
        "up of experts": fp8 * 8 * 2048,
        "gate of shared experts": fp8 * 2048,
        "up of shared experts": fp8 * 2048,
        "router scores": 4 * 256,
        "chosen experts and weights": 8 * (8 + 8 + 8 + 4),
    }
    small = {
        name: kept.pop(name) for name in list(kept) if name.startswith(("statistics", "visits of"))
    }
    assert kept == {name: round(tokens * size) for name, size in per_token.items()}
    # of four norms, and the counts of experts
    assert sum(small.values()) == 4 * 4 * tokens + 4 * 256


def test_what_a_program_computes_again_is_whole_while_its_block_runs() -> None:
    config, layout = build_deepseek_run(), ParallelLayout(shard=64, expert=64)
    shares = {}
    for name, system in {
        "plain": MemoryProfile(),
        "again": MemoryProfile(recomputed="latent"),
    }.items():
        ledger = estimate_peak_memory(
            config, layout, system=replace(system, measured="allocated", evaluation="none")
        )
        items = {
            item.name: item.bytes
            for item in find_instant(ledger, "in the backward of the first block").items
        }
        shares[name] = items.get("recomputed block", 0)
    # The latents' norms, queries, keys, and keys with values, of a dense layer, whose feed-forward
    # is over by then.
    assert shares["plain"] == 0
    assert shares["again"] == 2 * 4096 * (7168 + 1536 + 512 + 128 * (192 + 192 + 256))


@pytest.mark.parametrize(
    "names", [CHEAP_OUTPUTS, UP_PROJECTIONS, LINEAR_INPUTS], ids=["cheap", "projections", "inputs"]
)
def test_each_name_of_a_tensor_that_a_program_shrinks_is_that_of_one(
    names: tuple[str, ...],
) -> None:
    config, plain = build_deepseek_run(), MemoryProfile()
    tensors = list_saved_tensors(config, ParallelLayout(shard=1, expert=64), plain)
    assert all(any(tensor.startswith(name) for tensor in tensors) for name in names)


def test_moments_in_16_bits_are_half_and_tensor_ranks_share_the_vocabulary() -> None:
    """ZeRO-1 over 8 tensor ranks by 4: 16-bit weights, float32 masters, moments of 4 or 2 bytes."""
    config = run_of(engine={"kind": "deepspeed", "zero_stage": 1})
    layout, rows = ParallelLayout(shard=4, tensor=8), list_model_tensors(LLAMA)
    usual, small = (
        compute_state_bytes(config, layout, rows, MemoryProfile(moments=number))
        for number in ("fp32", "bf16")
    )
    vocabulary, norms = 2 * 128_256 * 4096, 65 * 4096
    own = (8_030_261_248 - norms) // 8 + norms
    assert (
        vocabulary + sum(row.num_elements for row in rows if "blocks" in row.name) + 4096
        == 8_030_261_248
    )
    assert usual.weights == 2 * own
    assert (usual.masters, usual.moments, small.moments) == (own, 2 * own, own)
