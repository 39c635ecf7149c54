"""Laws of the time of a step: more of a resource is never slower, and work that is split is
less.
"""

from math import comb, log
from typing import Any

import pytest

from llmsys.config.engine import DeepSpeedEngineConfig, TorchEngineConfig
from llmsys.config.loading.load import load_model_config
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.attention_time import FLEX_BACKWARD, compute_fused_rate
from llmsys.estimate.communication_time import (
    RankGroup,
    estimate_all_gather_seconds,
    estimate_all_reduce_seconds,
    estimate_all_to_all_seconds,
    estimate_small_all_reduce_seconds,
)
from llmsys.estimate.device_profile import DeviceProfile, Interconnect, load_device_profile
from llmsys.estimate.percentile_interval import Z90
from llmsys.estimate.program_profile import ProgramProfile, load_program_profile
from llmsys.estimate.step_time import StepTime, estimate_step_time

H100 = load_device_profile("h100-sxm")
COMPILED = ProgramProfile(name="compiled", description="fused kernels")
EAGER = load_program_profile("llmsys-eager")
DENSE, MOE = load_model_config("model/llama3.1-8b"), load_model_config("model/qwen3-30b-a3b")


def run(model: ModelConfig = DENSE, sequences: int = 64, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": model,
            "batch": {"sequence_length": 4096, "sequences": sequences, "micro_sequences": 1},
            "train": {"tokens": sequences * 4096 * 1000, **train},
            "schedule": {"kind": "cosine", "warmup_tokens": 0},
        }
    )


def seconds(
    config: RunConfig, layout: ParallelLayout, device: DeviceProfile = H100, **more: Any
) -> StepTime:
    return estimate_step_time(config, layout, device, program=more.pop("program", COMPILED), **more)


def change_time(changes: dict[str, Any]) -> ProgramProfile:
    return COMPILED.model_copy(update={"time": COMPILED.time.model_copy(update=changes)})


def scaled(field: str, factor: float) -> DeviceProfile:
    """The device with one bandwidth or peak times a factor."""
    if field in ("node", "network"):
        link = H100.get_interconnect(field)  # type: ignore[arg-type]
        return H100.model_copy(
            update={field: link.model_copy(update={"bandwidth": link.bandwidth * factor})}
        )
    if field == "peak_flops":
        return H100.model_copy(
            update={field: {name: one * factor for name, one in H100.peak_flops.items()}}
        )
    return H100.model_copy(update={field: getattr(H100, field) * factor})


LAYOUTS = (
    ParallelLayout(shard=1),
    ParallelLayout(shard=64),
    ParallelLayout(shard=16, replicate=4),
    ParallelLayout(shard=8, tensor=8),
    ParallelLayout(shard=8, context=8),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("field", ["node", "network", "memory_bandwidth", "peak_flops"])
def test_more_bandwidth_or_peak_is_never_slower(layout: ParallelLayout, field: str) -> None:
    plain = seconds(run(), layout).seconds.p50
    assert seconds(run(), layout, scaled(field, 2)).seconds.p50 <= plain
    assert seconds(run(), layout, scaled(field, 0.5)).seconds.p50 >= plain


def test_every_resource_is_felt_by_the_layout_that_needs_it() -> None:
    for field, layout in (
        ("peak_flops", LAYOUTS[0]),
        ("network", LAYOUTS[1]),
        ("node", LAYOUTS[3]),
    ):
        assert (
            seconds(run(), layout, scaled(field, 0.5)).seconds.p50
            > 1.01 * seconds(run(), layout).seconds.p50
        )


def test_a_tensor_split_shares_compute_and_pays_in_traffic() -> None:
    one, split = (
        seconds(run(sequences=1), ParallelLayout(shard=1)),
        seconds(run(sequences=1), ParallelLayout(shard=1, tensor=8)),
    )
    assert one.parts["products"] / 8 < split.parts["products"] < one.parts["products"] / 5
    assert split.parts["attention"] == pytest.approx(one.parts["attention"] / 8)
    assert one.parts["tensor"] == 0 < split.parts["tensor"]


def test_a_context_split_shares_a_sequence_and_experts_exchange_over_their_axis() -> None:
    one, split = (
        seconds(run(sequences=1), ParallelLayout(shard=1)),
        seconds(run(sequences=1), ParallelLayout(shard=1, context=4)),
    )
    assert split.parts["attention"] == pytest.approx(one.parts["attention"] / 4)
    assert one.parts["context"] == 0 < split.parts["context"]
    dealt = seconds(run(MOE), ParallelLayout(shard=8, expert=8))
    assert dealt.parts["expert"] > 0 == seconds(run(MOE), ParallelLayout(shard=8)).parts["expert"]


def test_work_grows_with_the_batch_and_shrinks_with_ranks() -> None:
    layout = ParallelLayout(shard=8)
    assert seconds(run(sequences=128), layout).parts["products"] == pytest.approx(
        2 * seconds(run(sequences=64), layout).parts["products"]
    )
    assert (
        seconds(run(), ParallelLayout(shard=64)).seconds.p50
        < seconds(run(), layout).seconds.p50 / 6
    )


def test_recomputation_costs_a_forward_and_counts_as_hardware_utilisation_only() -> None:
    plain, block = (
        seconds(run(), ParallelLayout(shard=8)),
        seconds(run(activation_checkpoint="full"), ParallelLayout(shard=8)),
    )
    selective = seconds(run(activation_checkpoint="selective"), ParallelLayout(shard=8))
    assert plain.seconds.p50 < selective.seconds.p50 < block.seconds.p50
    assert block.parts["recomputation"] > plain.parts["products"] / 4
    assert plain.hfu == pytest.approx(plain.mfu)
    assert block.hfu == pytest.approx(block.mfu * 4 / 3, rel=0.08)
    assert block.mfu < plain.mfu < plain.full_mfu


def test_a_pipelines_bubble_is_that_of_the_formula() -> None:
    # Narayanan 2021, 2.2: (p − 1) / (v · m) of the time without it.
    for stages, parts in ((4, 1), (4, 2), (8, 1)):
        step = seconds(
            run(sequences=16), ParallelLayout(shard=1), pipeline=stages, interleave=parts
        )
        ideal = sum(step.parts.values()) - sum(
            step.parts[name] for name in ("bubble", "data", "optimizer")
        )
        assert step.parts["bubble"] == pytest.approx(ideal * (stages - 1) / (parts * 16))


def test_eager_and_unfused_programs_are_slower_and_small_steps_wait_for_the_host() -> None:
    layout = ParallelLayout(shard=8)
    assert seconds(run(), layout, program=EAGER).seconds.p50 > seconds(run(), layout).seconds.p50
    unfused = change_time({"attention": "unfused"})
    assert (
        seconds(run(), layout, program=unfused).parts["attention"]
        > 2 * seconds(run(), layout).parts["attention"]
    )
    small = RunConfig.model_validate({"batch": {"sequence_length": 512, "sequences": 8}})
    assert seconds(small, layout, program=EAGER).parts["host"] > 0
    assert seconds(run(), layout, program=EAGER).parts["host"] == 0


def test_utilisation_is_operations_over_the_peak() -> None:
    step = seconds(run(), ParallelLayout(shard=8))
    assert step.tokens_per_second_per_device == pytest.approx(64 * 4096 / step.seconds.p50 / 8)
    assert 0.2 < step.mfu < 0.7
    assert step.seconds.p10 < step.seconds.p50 < step.seconds.p90
    assert sum(step.parts.values()) == pytest.approx(step.seconds.p50)


def test_experts_are_less_certain_than_dense_models() -> None:
    dense, moe = (
        seconds(run(), ParallelLayout(shard=8)).seconds,
        seconds(run(MOE), ParallelLayout(shard=8)).seconds,
    )
    assert moe.p90 / moe.p50 > dense.p90 / dense.p50


def test_collectives_follow_their_volumes_and_links() -> None:
    inside, across = RankGroup(8), RankGroup(8, stride=8)
    wire = H100.get_interconnect("node").bandwidth * H100.efficiency.links
    assert estimate_all_gather_seconds(inside, 8e9, H100) == pytest.approx(7e9 / wire, rel=1e-2)
    assert estimate_all_reduce_seconds(inside, 8e9, H100) == 2 * estimate_all_gather_seconds(
        inside, 8e9, H100
    )
    assert estimate_all_gather_seconds(across, 8e9, H100) > 8 * estimate_all_gather_seconds(
        inside, 8e9, H100
    )
    assert estimate_all_gather_seconds(RankGroup(64), 8e9, H100) < estimate_all_gather_seconds(
        RankGroup(8, stride=8), 8e9, H100
    )
    assert (
        estimate_all_gather_seconds(RankGroup(1), 8e9, H100)
        == estimate_all_to_all_seconds(RankGroup(1), 8e9, H100)
        == 0
    )
    assert estimate_all_to_all_seconds(RankGroup(64), 8e9, H100) > estimate_all_to_all_seconds(
        inside, 8e9, H100
    )


def test_a_token_travels_once_to_each_rank_that_holds_its_experts() -> None:
    layout, own = ParallelLayout(shard=8, expert=8), change_time({"expert_rows": "rank"})
    each, once = (seconds(run(MOE), layout, program=one).parts["expert"] for one in (COMPILED, own))
    # 8 of 128 experts on 8 ranks of 16: 8 · (1 - C(112, 8) / C(128, 8)) = 5.37 ranks of a token.
    visits = 8 * (1 - comb(112, 8) / comb(128, 8))
    row = MOE.hidden_size * 2
    assert once / each == pytest.approx(visits / 8 * (row + 8 * (8 + 2) / 2) / row, rel=0.01)
    # On as many ranks as experts nothing is saved, but 16 machines get fewer rows than 128 ranks.
    wide = ParallelLayout(shard=128, expert=128)
    each, once = (
        seconds(run(MOE, sequences=128), wide, program=one).parts["expert"]
        for one in (COMPILED, own)
    )
    machines = 16 * (1 - comb(120, 8) / comb(128, 8))
    assert each / once == pytest.approx(machines * (15 / 16) / (8 * 120 / 128), rel=0.01)


def test_an_all_to_all_by_visits_sends_each_and_sorts_again() -> None:
    layout, visit = ParallelLayout(shard=64, expert=64), change_time({"expert_rows": "visit"})
    once, each = (seconds(run(MOE), layout, program=one).parts for one in (COMPILED, visit))
    machines = 8 * (1 - comb(112, 8) / comb(128, 8))
    assert each["expert"] / once["expert"] == pytest.approx(
        8 * 56 / 64 / (machines * 7 / 8), rel=0.01
    )
    moved = 8 * MOE.hidden_size
    assert each["permutation"] / once["permutation"] == pytest.approx(
        (9 * moved + 3 * 128) / (5 * moved + 3 * 128)
    )


def test_a_rank_with_more_tokens_delays_experts_and_their_exchange_alone() -> None:
    layout = ParallelLayout(shard=8, expert=8)
    even, skewed = (seconds(run(MOE), layout, expert_load=load).parts for load in (1.0, 1.5))
    for part in ("permutation", "expert"):
        assert skewed[part] == pytest.approx(1.5 * even[part], rel=1e-2)
    assert 1.3 * even["experts"] < skewed["experts"] <= 1.5 * even["experts"]
    for part in ("products", "attention", "elementwise", "optimizer"):
        assert skewed[part] == even[part]


def test_attention_is_priced_by_the_kernel_that_the_model_takes() -> None:
    chosen = change_time({"attention": "chosen"})

    def estimate(model: ModelConfig, **more: Any) -> float:
        return seconds(run(model), ParallelLayout(shard=8), program=chosen, **more).parts[
            "attention"
        ]

    whole = estimate(DENSE)
    # Lengths in place of a table: two documents of half a sequence need half the pairs, at a lower
    # rate.
    slower = compute_fused_rate(4097, 128) / compute_fused_rate(2049, 128)
    assert estimate(DENSE, documents=(2048,)) == pytest.approx(whole / 2 * slower, rel=1e-3)
    assert whole == pytest.approx(seconds(run(DENSE), ParallelLayout(shard=8)).parts["attention"])
    old = H100.model_copy(update={"compute_capability": (7, 5)})
    assert estimate(DENSE, device=old) > 4 * whole
    capped = DENSE.model_copy(
        update={"attention": DENSE.attention.model_copy(update={"logit_softcap": 30.0})}
    )
    # flex_attention, and 128 channels are a power of two: only its backward is slower.
    ratio = H100.efficiency.attention_backward / H100.efficiency.attention
    flex = (ratio + 2.5 / FLEX_BACKWARD) / (ratio + 2.5)
    assert estimate(capped) == pytest.approx(whole * flex)
    latent = load_model_config("model/deepseek-v3")
    plain = seconds(run(latent), ParallelLayout(shard=8)).parts["attention"]
    assert estimate(latent) == pytest.approx(plain)  # keys in two parts
    assert estimate(
        latent, device=H100.model_copy(update={"compute_capability": (8, 9)})
    ) == pytest.approx(plain * (256 + 128) / (192 + 128) * flex)


def test_the_last_of_even_stages_has_the_head_on_top() -> None:
    even, config = change_time({"stages": "even"}), run(DENSE, 64)
    steps = {
        name: seconds(config, ParallelLayout(shard=8), pipeline=4, program=program)
        for name, program in (("even", even), ("balanced", COMPILED))
    }
    wait = (steps["even"].parts["bubble"] - steps["balanced"].parts["bubble"]) / steps[
        "even"
    ].factor
    # Three quarters of the head are more than the mean, in each of eight micro-batches.
    head = (
        6
        * 4096
        * DENSE.vocab_size
        * DENSE.hidden_size
        / (H100.peak_flops["bf16"] * H100.efficiency.products)
    )
    assert 1 < wait / (8 * 0.75 * head) < 1.35, "the loss is on top of the products"


def test_matmuls_are_priced_as_their_own_type_or_rejected() -> None:
    layout = ParallelLayout(shard=8)
    products = {
        dtype: seconds(run(), layout, matmul_dtype=dtype).parts["products"]
        for dtype in ("compute", "fp8_tensor", "fp8_block", "fp8")
    }
    assert sorted(products, key=lambda dtype: products[dtype]) == [
        "fp8_tensor",
        "fp8_block",
        "fp8",
        "compute",
    ]
    b200 = load_device_profile("b200")
    narrow = [
        seconds(run(), layout, b200, matmul_dtype=dtype).parts["products"]
        for dtype in ("nvfp4", "mxfp8", "compute")
    ]
    assert narrow == sorted(narrow)
    for dtype, device, message in (
        ("nvfp4", "h100-sxm", "has no peak for nvfp4 matmuls"),
        (
            "mxfp8",
            "h100-sxm",
            "mxfp8 matmuls need compute capability 10.0, and H100 SXM 80GB has 9.0",
        ),
        ("fp8", "a100-80gb", "has no peak for fp8 matmuls"),
    ):
        with pytest.raises(ConfigError, match=message):
            seconds(run(), layout, load_device_profile(device), matmul_dtype=dtype)
    own = estimate_step_time(run(matmul_dtype="fp8"), layout, H100)
    assert own.parts["products"] < estimate_step_time(run(), layout, H100).parts["products"]


def compute_messages(engine: dict[str, Any], micro_batches: int = 4) -> float:
    """Return the seconds of messages of weights and gradients of a step on 8 ranks of a machine, of
    which nothing is hidden.
    """
    config = run(sequences=8 * micro_batches).model_copy(
        update={"engine": TorchEngineConfig.model_validate(engine)}
    )
    step = seconds(config, ParallelLayout(shard=8), program=change_time({"data_overlap": 0.0}))
    return step.parts["data"] / step.factor


@pytest.mark.parametrize(("engine", "gathers", "reductions", "bytes_of_sums"), [
    ({}, 8, 4, 4),
    ({"reshard": "never"}, 4, 4, 4),
    ({"reshard": "after_step"}, 1, 4, 4),
    ({"reduce_dtype": "bf16"}, 8, 4, 2),
    ({"gradient_accumulation": "whole"}, 8, 1, 4),
    ({"reshard": "after_step", "gradient_accumulation": "whole"}, 1, 1, 4),
    ({"data_parallel": "plain"}, 1, 1, 4),
])  # fmt: skip
def test_messages_of_a_step_are_those_that_its_policy_sends(
    engine: dict[str, Any], gathers: int, reductions: int, bytes_of_sums: int
) -> None:
    link, parameters = H100.get_interconnect("node"), 8_030_261_248
    # llama3.1-8b in four micro-batches; every rank sends 7/8 of a whole, to the next of a ring.
    sent = 7 / 8 * parameters * (2 * gathers + bytes_of_sums * reductions)
    expected = sent / (link.bandwidth * H100.efficiency.links)
    # a message for each of 32 blocks
    latency = 32 * 7 * link.latency_seconds * (gathers + reductions)
    assert compute_messages(engine) == pytest.approx(expected + latency, rel=1e-9)


def test_messages_of_plain_hide_behind_nothing() -> None:
    engine = TorchEngineConfig(data_parallel="plain")
    config = run(sequences=32).model_copy(update={"engine": engine})
    hidden, shown = (
        seconds(config, ParallelLayout(shard=8), program=change_time({"data_overlap": share}))
        for share in (1.0, 0.0)
    )
    assert hidden.parts["data"] == pytest.approx(shown.parts["data"])


def test_messages_go_around_all_ranks_so_long_rings_of_a_slow_network_lose_time() -> None:
    slow = H100.model_copy(
        update={"network": Interconnect(bandwidth=6.25e9, latency_seconds=15e-6)}
    )
    layouts = [ParallelLayout(shard=8 * machines) for machines in (1, 8, 128)]
    # 16 sequences on each rank
    steps = [
        seconds(
            run(sequences=16 * one.shard), one, slow, program=change_time({"data_overlap": 0.5})
        )
        for one in layouts
    ]
    one, eight, many = (step.parts["data"] / step.factor for step in steps)
    assert one < eight < many
    # 1,024 ranks: 7 hops within each of 128 machines and 127 between them, for each of 32 blocks
    around = 128 * 7 * 6e-6 + 127 * 15e-6
    group = RankGroup(1024)
    plain, blocks = (estimate_all_gather_seconds(group, 1e9, slow, count) for count in (1, 32))
    assert blocks - plain == pytest.approx(31 * around)


def test_gathers_of_8_bit_matmuls_send_half_of_the_bytes() -> None:
    layout = ParallelLayout(shard=2, tensor=4)
    link = Interconnect(bandwidth=450e9, latency_seconds=0)
    wide, narrow = (
        seconds(
            run(),
            layout,
            H100.model_copy(update={"node": link}),
            program=change_time({"gathers": kind}),
            matmul_dtype="fp8_tensor",
        ).parts["tensor"]
        for kind in ("compute", "matmul")
    )
    # four scatters keep 16 bits, and six gathers send 8
    assert narrow / wide == pytest.approx((4 + 3) / 10)
    same = seconds(run(), layout, program=change_time({"gathers": "matmul"})).parts["tensor"]
    assert same == seconds(run(), layout, program=change_time({})).parts["tensor"]


def test_a_ring_with_documents_computes_every_pair_in_float32() -> None:
    layout = ParallelLayout(shard=1, context=8, context_kind="ring")
    config = run(sequences=1)
    whole = {"sequence_length": 8192, "attention_scope": "window"}
    config = config.model_copy(update={"batch": config.batch.model_copy(update=whole)})
    packed = config.model_copy(
        update={"batch": config.batch.model_copy(update={"attention_scope": "document"})}
    )
    fused, eager = (
        seconds(one, layout, documents=lengths, program=load_program_profile("llmsys"))
        for one, lengths in ((config, ()), (packed, (1024,)))
    )
    model = config.model
    scores = model.num_hidden_layers * model.num_attention_heads * 8192**2 / 8
    least = 3.5 * 2 * scores * 2 * model.head_dim / H100.get_peak_flops("fp32")
    assert eager.parts["attention"] / eager.factor > least
    assert eager.parts["attention"] > 20 * fused.parts["attention"]


def test_a_small_all_reduce_within_a_machine_takes_one_step() -> None:
    group, small = RankGroup(8), 8192 * 2.0
    assert 8e-6 <= estimate_small_all_reduce_seconds(group, small, H100) <= 15e-6
    assert estimate_all_reduce_seconds(group, small, H100) > 80e-6
    large = 1e9
    assert estimate_small_all_reduce_seconds(group, large, H100) == estimate_all_reduce_seconds(
        group, large, H100
    )
    machines = RankGroup(16)
    assert estimate_small_all_reduce_seconds(machines, small, H100) == estimate_all_reduce_seconds(
        machines, small, H100
    )


def test_the_deviation_of_a_step_has_a_part_between_programs() -> None:
    layout = ParallelLayout(shard=8)
    unknown, known = (
        seconds(run(), layout, program=load_program_profile(name))
        for name in ("unknown", "megatron")
    )
    assert unknown.between > known.between > 0
    assert unknown.spread > known.spread > known.between
    for step in (unknown, known):
        width = log(step.seconds.p90 / step.seconds.p10)
        assert width == pytest.approx(2 * Z90 * step.spread)
    output = unknown.to_output()
    assert (output.residual_spread, output.program_spread) == (unknown.spread, unknown.between)


def test_an_all_reduce_of_small_messages_goes_up_a_tree_and_a_large_one_around_the_ring() -> None:
    one_of_each = RankGroup(128, 8)
    link = H100.get_interconnect("network")
    small = estimate_all_reduce_seconds(one_of_each, 1.0, H100, 10)
    assert small == pytest.approx(2 * 10 * 7 * link.latency_seconds, rel=1e-3)
    large = estimate_all_reduce_seconds(one_of_each, 1e12, H100, 10)
    sent = 2 * 1e12 * 127 / 128 / (link.bandwidth * H100.efficiency.links)
    assert large == pytest.approx(sent + 2 * 10 * 127 * link.latency_seconds)


def price_messages(layout: ParallelLayout, owned: str) -> float:
    """Seconds of weights and gradients under ZeRO-1 where the way to another machine takes a second
    and bytes take no time.
    """
    device = H100.model_copy(
        update={
            "node": Interconnect(bandwidth=1e30, latency_seconds=0.0),
            "network": Interconnect(bandwidth=1e30, latency_seconds=1.0),
        }
    )
    program = change_time({"owned": owned, "data_overlap": 0.0})
    config = run(sequences=2048).model_copy(update={"engine": DeepSpeedEngineConfig(zero_stage=1)})
    found = seconds(config, layout, device, program=program)
    return found.parts["data"] / found.factor


def test_every_bucket_is_summed_over_the_replicas() -> None:
    # up and down a tree of 4 machines, for each of 32 blocks; a replica is inside of a machine
    assert price_messages(ParallelLayout(replicate=4, shard=8), "slices") == pytest.approx(128)
    assert price_messages(ParallelLayout(replicate=1, shard=8), "slices") == pytest.approx(0)


@pytest.mark.parametrize(("ranks", "owners"), [(32, 32), (1024, 291)])
def test_owners_of_whole_tensors_send_their_weights_one_by_one(ranks: int, owners: int) -> None:
    # Llama 3.1 8B: 9 tensors in each of 32 blocks, embedding, head and the last norm
    machines = ranks // 8
    summed = 2 * 32 * log(machines, 2)
    sent = owners * (machines - 1)
    found = price_messages(ParallelLayout(shard=ranks), "tensors")
    assert found == pytest.approx(summed + sent)
