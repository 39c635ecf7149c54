"""Laws of batch sizes: how large a step is and what came before it, with and without a ramp."""

from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.batch import BatchConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.run import BATCH_TRAJECTORY, RunConfig
from llmsys.errors import ConfigError

LENGTH = 8
FP32 = {"train": {"precision": "fp32"}}


def batch(**settings: object) -> BatchConfig:
    return BatchConfig.model_validate({"sequence_length": LENGTH, **settings})


RAMPS = [
    batch(sequences=16, ramp={"start_tokens": 16, "ramp_tokens": 4000}),
    batch(sequences=12, ramp={"start_tokens": 32, "ramp_tokens": 1999, "increment_sequences": 4}),
    # more sizes than steps: some are left out
    batch(sequences=40, ramp={"start_tokens": 8, "ramp_tokens": 500}),
    batch(sequences=64, ramp={"start_tokens": 256, "ramp_tokens": 1}),
]
DOUBLED = [
    batch(sequences=16, ramp={"kind": "noise_scale", "start_tokens": 16}),
    batch(
        sequences=16,
        ramp={"kind": "noise_scale", "start_tokens": 16, "doubled_after_steps": (3, 4, 90)},
    ),
]


@pytest.mark.parametrize("config", [batch(sequences=5), batch(tokens=48), *RAMPS, *DOUBLED])
def test_steps_follow_each_other_without_gap_or_overlap(config: BatchConfig) -> None:
    sequences = 0
    for step in range(200):
        assert config.count_sequences_before(step) == sequences
        assert config.count_tokens_before(step) == sequences * LENGTH
        assert config.count_steps_for(sequences * LENGTH) == step
        assert config.count_steps_for(sequences * LENGTH + 1) == step + 1
        assert config.get_step_tokens(step) == config.get_step_sequences(step) * LENGTH
        assert config.get_step_sequences(step) in config.step_sizes
        sequences += config.get_step_sequences(step)


@pytest.mark.parametrize("config", RAMPS)
def test_a_ramp_is_the_straight_line_in_tokens_on_whole_quanta(config: BatchConfig) -> None:
    assert config.ramp is not None
    start, full = config.ramp.start_tokens // LENGTH, config.sequences_per_step
    quantum, over = config.ramp.compute_increment(LENGTH), config.ramp.ramp_tokens
    for step in range(200):
        share = min(1.0, config.count_tokens_before(step) / over)
        line = start + (full - start) * share
        assert line - quantum < config.get_step_sequences(step) <= line + 1e-9
        assert config.get_step_sequences(step) % quantum == 0
    assert config.get_step_sequences(0) == start
    assert config.get_step_sequences(config.count_steps_for(over)) == full


def test_a_batch_doubles_after_the_recorded_steps() -> None:
    unknown, known = DOUBLED
    assert {unknown.get_step_sequences(step) for step in range(200)} == {2}
    assert [known.get_step_sequences(step) for step in (0, 2, 3, 4, 89, 90)] == [2, 2, 4, 8, 8, 16]
    assert unknown.step_sizes == known.step_sizes == (2, 4, 8, 16)


def test_a_stage_of_short_sequences_ends_with_the_step_that_reaches_its_tokens() -> None:
    stages = [
        {"until_tokens": 256, "sequence_length": 8},
        {"until_tokens": 500, "sequence_length": 16},
    ]
    batch = BatchConfig.model_validate(
        {"sequence_length": 32, "sequences": 4, "length_stages": stages}
    )
    # Steps of 128 tokens: the third begins at 256, and the fifth at 512.
    assert [batch.get_step_length(step) for step in range(5)] == [8, 8, 16, 16, 32]


def test_the_ramp_of_gpt3_is_quick_to_ask_about() -> None:
    ramp = {"start_tokens": 32_768, "ramp_tokens": 4_000_000_000}
    config = BatchConfig(sequence_length=2048, tokens=3_145_728, ramp=ramp)
    assert config.get_step_sequences(0) == 16
    assert config.get_step_sequences(10**6) == 1536
    # equally many tokens at each of the 95 sizes
    rungs = sum(1 / (16 * rung) for rung in range(1, 96))
    assert config.count_steps_for(4_000_000_000) == pytest.approx(4e9 / 95 / 2048 * rungs, rel=0.02)
    assert config.count_tokens_before(config.count_steps_for(300_000_000_000)) >= 300_000_000_000


def test_the_budget_of_a_run_counts_the_small_steps_at_its_start() -> None:
    settings = {
        "batch": {
            "sequence_length": 8,
            "sequences": 16,
            "ramp": {"start_tokens": 16, "ramp_tokens": 4000},
        }
    }
    config = RunConfig.model_validate(settings | {"train": {"tokens": 10_000}})
    assert config.num_steps > -(-10_000 // config.batch.tokens_per_step)
    assert (
        config.batch.count_tokens_before(config.num_steps - 1)
        < 10_000
        <= config.batch.count_tokens_before(config.num_steps)
    )


def test_the_ramp_belongs_to_the_trajectory() -> None:
    ramp = {"batch": {"ramp": {"start_tokens": 512, "ramp_tokens": 10_000}}}
    doubling = {"kind": "noise_scale", "start_tokens": 512}
    given = {"batch": {"ramp": doubling | {"doubled_after_steps": [3]}}}
    measured = {
        "batch": {"ramp": doubling, "micro_sequences": 1},
        "train": {"noise_scale_every_steps": 2},
    }
    recorded = [
        RunConfig.model_validate(one).resolve_precision("fp32").trajectory_settings
        for one in (given, measured)
    ]
    assert [one["batch"]["ramp"].get("every_steps") for one in recorded] == [None, 2]
    assert [one["batch"]["ramp"]["doubled_after_steps"] for one in recorded] == [[3], []]
    with_ramp = RunConfig.model_validate(ramp).resolve_precision("fp32")
    expected = {
        "kind": "linear",
        "start_tokens": 512,
        "ramp_tokens": 10_000,
        "increment_sequences": None,
    }
    assert with_ramp.trajectory_settings["batch"]["ramp"] == expected
    without = RunConfig().resolve_precision("fp32").trajectory_settings["batch"]
    assert without["ramp"] is None
    assert without.keys() == {*BATCH_TRAJECTORY, "tokens"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ramp": {"start_tokens": 20, "ramp_tokens": 9}},
            r"ramp.start_tokens: 20 is not a multiple .* Use 16 or 24",
        ),
        (
            {"ramp": {"start_tokens": 4, "ramp_tokens": 9}},
            r"ramp.start_tokens: 4 is not a multiple .*=8. Use 8",
        ),
        (
            {"ramp": {"start_tokens": 128, "ramp_tokens": 9}},
            r"128 is not less than the 128 tokens of a full step",
        ),
        (
            {"ramp": {"start_tokens": 48, "ramp_tokens": 9}},
            r"ramp.increment_sequences: steps of 6 to 16 sequences are not multiples of 6. Use 2, "
            r"or other sizes",
        ),
    ],
)
def test_a_ramp_that_cannot_be_climbed_is_refused_with_what_would_do(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        batch(sequences=16, **settings)


def test_balance_without_documents_is_refused() -> None:
    with pytest.raises(
        ValidationError,
        match=r"balanced equalizes the attention cost of documents, .* Use sequential, or "
        r"attention_scope=document",
    ):
        RunConfig.model_validate({"batch": {"assignment": "balanced", "attention_scope": "window"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing": "best_fit"},
            "not read on where packing=best_fit takes documents in another order",
        ),
        (
            {"length_stages": [{"until_tokens": 9, "sequence_length": 256}]},
            "not read on where length_stages divide",
        ),
        (
            {"ramp": {"start_tokens": 512, "ramp_tokens": 40_000}},
            "not read on where ramp changes the number of rows",
        ),
    ],
)
def test_consecutive_windows_need_rows_that_stay(changes: dict[str, object], message: str) -> None:
    given = {"sequence_length": 512, "sequences": 4, "window_order": "consecutive"}
    assert (
        RunConfig.model_validate({"batch": given} | FP32).trajectory_settings["batch"][
            "window_order"
        ]
        == "consecutive"
    )
    with pytest.raises(
        ValidationError, match=rf"window_order: consecutive rows are {message}.*Use shuffled"
    ):
        RunConfig.model_validate({"batch": given | changes})


def test_room_by_document_needs_attention_by_document_and_is_in_the_trajectory() -> None:
    def find_routing(scope: str, *words: str) -> Any:
        config = load_run_config(
            "train/demo",
            [
                f"model.moe.routing={{kind: capacity, scope: {scope}}}",
                "train.precision=fp32",
                *words,
            ],
        )
        return config.trajectory_settings["model"]["moe"]["routing"]

    assert find_routing("sequence") == {"kind": "capacity", "factor": 1.25, "scope": "sequence"}
    assert find_routing("document") == {"kind": "capacity", "factor": 1.25, "scope": "document"}
    with pytest.raises(
        ConfigError, match=r"document has no borders to count by.*Use sequence, or attention_scope"
    ):
        find_routing("document", "batch.attention_scope=window")


def test_pairs_refuse_what_is_for_windows() -> None:
    ramp = "batch.ramp={start_tokens: 256, ramp_tokens: 9999}"
    with pytest.raises(ConfigError) as caught:
        load_run_config(
            "train/multi30k", [ramp, "batch.assignment=balanced", "batch.micro_sequences=auto"]
        )
    for words in (
        "pairs and texts are batched in length buckets",
        "length buckets are balanced",
        "auto applies to packed sequences",
    ):
        assert words in str(caught.value)
