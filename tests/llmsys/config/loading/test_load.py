"""From sparse files and overrides to one config: inheritance, unions, and every problem at once."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from llmsys.config.loading.load import (
    load_model_config,
    load_run_config,
    read_config,
)
from llmsys.errors import ConfigError
from tests.helpers.paths import CONFIGS

# those are no runs
MODEL = """\
vocab_size: 1000
hidden_size: 64
intermediate_size: 128
num_hidden_layers: 2
num_attention_heads: 4
"""
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file below an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def writer(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return writer


def refusal(config: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(config, overrides)
    return str(caught.value)


def test_a_config_is_found_by_path_and_by_name() -> None:
    # One of each folder: the files themselves are loaded in test_shipped_configs.py.
    paths = {path.parent: path for path in sorted(CONFIGS.glob("*/*.yaml"))}
    assert len(paths) >= 4
    for path in paths.values():
        name = path.relative_to(CONFIGS).with_suffix("").as_posix()
        assert read_config(name).run == read_config(str(path)).run


def test_three_mistakes_are_reported_at_once_with_file_line_and_key(write: Write) -> None:
    write(
        "run.yaml",
        "batch:\n  sequence_length: long\noptimizer:\n  learning_rat: 1e-3\nschedule:\n  kind: "
        "cos\n",
    )
    assert refusal("run.yaml").splitlines() == [
        "3 problems in run.yaml:",
        "  run.yaml:2: batch.sequence_length: 'long' is not a whole number. Use digits, such as 8 "
        "or 1_000. Length of one packed sequence, in tokens.",
        "  run.yaml:4: optimizer.learning_rat: unknown key. Did you mean learning_rate?",
        "  run.yaml:6: schedule.kind: 'cos' is not wsd, cosine, linear, constant, inverse_sqrt, "
        "noam or python. Did you mean cosine?",
    ]


def test_rules_between_keys_are_all_reported(write: Write) -> None:
    write(
        "run.yaml",
        "model:\n  hidden_size: 66\n  num_attention_heads: 4\n  num_key_value_heads: 3\n"
        "  vocab_size: 9\n  num_hidden_layers: 1\n  intermediate_size: 8\n",
    )
    text = refusal("run.yaml")
    assert "run.yaml:3: model.num_attention_heads: 4 does not divide hidden_size=66" in text
    assert "run.yaml:4: model.num_key_value_heads: 3 does not divide" in text


def test_a_wrong_value_is_reported_once_and_not_again_for_what_follows_from_it(
    write: Write,
) -> None:
    write("m.yaml", MODEL)
    with pytest.raises(ConfigError) as caught:
        load_model_config("m.yaml", ["num_attention_heads=four"])
    assert str(caught.value).splitlines() == [
        "1 problem in m.yaml:",
        "  command line: model.num_attention_heads: 'four' is not a whole number. Use digits, "
        "such as 8 or 1_000. Query heads of each attention layer.",
    ]


def test_rules_between_sections_are_all_reported(write: Write) -> None:
    write("run.yaml", "batch: {sequence_length: 4096}\ntrain: {tokens: 100}\nlayout: {expert: 2}\n")
    text = refusal("run.yaml", "schedule.warmup_tokens=200")
    assert (
        "run.yaml:1: batch.sequence_length: 4096 positions are more than "
        "model.max_position_embeddings=2048"
    ) in text
    assert "run.yaml:2: train.tokens: 100 tokens are fewer than one step of 65536" in text
    assert "command line: schedule.warmup_tokens: warmup and decay take 200 tokens" in text
    assert "run.yaml:3: layout.expert: A dense model has no experts to split over expert=2" in text


def test_more_pieces_than_rows_are_refused(write: Write) -> None:
    write("run.yaml", f"model:\n{textwrap.indent(MODEL, '  ')}tokenizer: {{vocab_size: 2000}}\n")
    assert "2000 pieces exceed the 1000 rows of model.vocab_size" in refusal("run.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizr.eps=1", "command line: optimizr: unknown key. Did you mean optimizer?"),
        (
            "train.learning_rate=1",
            "train.learning_rate: unknown key. Did you mean optimizer.learning_rate?",
        ),
        ("learning_rat=1", "learning_rat: unknown key. Did you mean optimizer.learning_rate?"),
        (
            "engine.zero_stage=1",
            "engine.zero_stage: unknown key here; it belongs to kind deepspeed. Set engine.kind",
        ),
        ("train.zzz=1", "train.zzz: unknown key. Known here: tokens, fit_minutes,"),
        (
            "engine.kind=torhc",
            "engine.kind: 'torhc' is not torch, deepspeed or accelerate. Did you mean torch?",
        ),
        ("train.precision=fp8", "train.precision: 'fp8' is not auto, bf16, fp16 or fp32."),
        ("train.tokens=1.5", "train.tokens: 1.5 is not a whole number."),
        ("train.tokens=-1", "train.tokens: -1 is too small: the minimum is 1. Use 1 or more."),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: inf should be a finite number."),
        ("run.name=3", 'run.name: 3 is not text. Use "3".'),
        ("tokenizer=3", "tokenizer: 3 is not a section. Use tokenizer.kind=sentencepiece (or "),
        ("data.rules=[{min_words: 3}]", "data.rules.0.kind: is missing. Use gopher_repetition,"),
        ("schedule.kind=inverse_sqrt", "schedule.warmup_tokens: is missing. Warmup tokens;"),
        ("batch", "'batch' is not section.key=value. Write, say, batch.sequence_length=1024."),
        ("batch.=1", "'batch.=1' is not section.key=value."),
        ("run.name=[", "command line, run.name:1: not YAML:"),
    ],
)
def test_a_mistake_on_the_command_line_says_what_would_do(override: str, message: str) -> None:
    assert message in refusal("train/demo", override)


def test_soap_is_refused_where_matrices_are_in_flat_parts() -> None:
    message = refusal("train/demo", "engine.kind=deepspeed", "optimizer.kind=soap")
    assert (
        "optimizer.kind: soap is not built by engine.kind=deepspeed on flat shards. Use "
        "engine.zero_stage=0, or "
    ) in message


def test_adafactor_is_refused_where_one_matrix_of_biases_is_on_several_ranks() -> None:
    changes = (
        "engine.kind=deepspeed",
        "engine.zero_stage=0",
        "optimizer={kind: adafactor}",
        "model.moe.expert={bias: true}",
    )
    message = "optimizer.kind: adafactor takes the biases of all experts as one matrix"
    assert message in refusal("train/demo", *changes)
    load_run_config("train/demo", [*changes, "layout.expert=1"])


def test_numbers_may_be_written_as_people_write_them() -> None:
    config = load_run_config(
        "train/demo",
        ["optimizer.learning_rate=3e-4", "train.tokens=2_000_000", "train.log_every_steps=1e1"],
    )
    assert (config.optimizer.learning_rate, config.train.tokens, config.train.log_every_steps) == (
        3e-4,
        2_000_000,
        10,
    )


def test_a_base_is_merged_under_the_file_that_names_it(write: Write) -> None:
    write("low/model.yaml", MODEL)
    write(
        "low/base.yaml",
        "model: {base: model, num_hidden_layers: 3}\ntrain: {tokens: 500_000}\nrun: {seed: 5}\n",
    )
    write("top.yaml", "base: low/base.yaml\ntrain: {precision: fp32}\nrun: {seed: 6}\n")
    config = load_run_config("top.yaml")
    assert (config.model.num_hidden_layers, config.model.hidden_size) == (3, 64)
    assert (config.train.tokens, config.train.precision, config.run.seed) == (500_000, "fp32", 6)
    origins = read_config("top.yaml").origins
    assert origins[("model", "hidden_size")] == "low/model.yaml:2"
    assert origins[("train", "tokens")] == "low/base.yaml:2"
    assert origins[("run", "seed")] == "top.yaml:3"


def test_of_several_bases_the_later_wins(write: Write) -> None:
    write("a.yaml", "run: {name: a, seed: 1}\n")
    write("b.yaml", "run: {name: b}\n")
    write("top.yaml", "base: [a.yaml, b.yaml]\n")
    assert (load_run_config("top.yaml").run.name, load_run_config("top.yaml").run.seed) == ("b", 1)


def test_lists_replace_and_single_entries_can_be_overridden(write: Write) -> None:
    write(
        "a.yaml",
        "data: {rules: [{kind: c4}, {kind: gopher_quality}]}\ngeneration: {prompts: [x, y]}\n",
    )
    write("top.yaml", "base: a.yaml\ngeneration: {prompts: [z]}\n")
    config = load_run_config(
        "top.yaml", ["data.rules.1.min_words=7", "data.rules.0={kind: c4_datatrove}"]
    )
    assert config.generation.prompts == ("z",)
    assert config.data.rules[1].model_dump()["min_words"] == 7
    assert config.data.rules[0].kind == "c4_datatrove"
    assert "data.rules.2: the list has 2 entries, counted from 0. Use 0 to 1" in refusal(
        "top.yaml", "data.rules.2.x=1"
    )


@pytest.mark.parametrize("order", [1, -1])
def test_another_kind_starts_its_section_afresh(write: Write, order: int) -> None:
    write("a.yaml", "schedule: {kind: wsd, warmup_tokens: 7, decay_tokens: 9}\n")
    assert (
        load_run_config("a.yaml", ["schedule.warmup_tokens=8"]).schedule.model_dump()[
            "decay_tokens"
        ]
        == 9
    )
    schedule = load_run_config(
        "a.yaml", ["schedule.kind=linear", "schedule.min_lr_factor=0.5"][::order]
    ).schedule
    assert (schedule.kind, schedule.warmup_tokens) == ("linear", 0)


def test_the_default_kind_is_a_kind_too(write: Write) -> None:
    write("a.yaml", "engine: {}\nschedule: {min_lr_factor: 0.3}\nmodel: {base: m}\n")
    write("m.yaml", MODEL + "norm: {eps: 1e-6}\n")
    config = load_run_config("a.yaml", ["schedule.kind=constant", "model.norm.eps=1e-7"])
    assert config.schedule.kind == "constant"
    assert (config.model.norm.kind, config.model.norm.eps) == ("rmsnorm", 1e-7)
    assert load_model_config("m.yaml", ["norm.kind=layernorm"]).norm.eps == 1e-5


def test_a_bare_model_is_a_model_and_not_a_run(write: Write) -> None:
    write("m.yaml", MODEL + "max_position_embeddings: 128\n")
    assert read_config("m.yaml").is_model_only
    assert not read_config("train/demo").is_model_only
    assert load_model_config("m.yaml", ["num_hidden_layers=9"]).num_hidden_layers == 9
    assert (
        load_model_config("m.yaml", ["model.num_hidden_layers=9", "hidden_size=128"]).hidden_size
        == 128
    )
    assert read_config("m.yaml").run.batch.sequence_length == 128
    assert "m.yaml is a bare model, but a run config is needed." in refusal("m.yaml")


def test_an_override_can_name_a_base() -> None:
    assert (
        load_run_config(
            "train/demo", ["model.base=model/demo-moe", "model.num_hidden_layers=1"]
        ).model.num_hidden_layers
        == 1
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "bad.yaml is empty. Write at least one section"),
        ("- a\n", "bad.yaml holds a list, not a mapping."),
        (
            "base: bad.yaml\n",
            "base: forms a cycle: bad.yaml → bad.yaml. Remove one of these lines.",
        ),
        ("base: other.yaml\n", "base: forms a cycle: bad.yaml → other.yaml → bad.yaml."),
        ("run:\n  base: nowhere\n", "bad.yaml:2: config 'nowhere'"),
        ("base: 3\n", "bad.yaml:1: base: 3 is not a name or path of a config."),
        ("base: train/dem\n", "Did you mean train/demo?"),
        ("\ttrain: 3\n", "bad.yaml:1: this line is indented with a tab"),
    ],
)
def test_a_file_that_cannot_be_used_says_so_in_one_message(
    write: Write, text: str, message: str
) -> None:
    write("bad.yaml", text)
    write("other.yaml", "base: bad.yaml\n")
    assert message in refusal("bad.yaml")


def test_a_file_that_is_not_text_is_refused(write: Write) -> None:
    write("x.yaml", "").write_bytes(b"\xff\xfe\x00")
    assert "x.yaml cannot be read" in refusal("x.yaml")


def test_a_name_is_looked_up_by_its_last_part_when_only_one_file_has_it(write: Write) -> None:
    assert read_config("demo-moe") == read_config("model/demo-moe")
    write("configs/a/twin.yaml", MODEL)
    write("configs/b/twin.yaml", MODEL)
    assert "'twin' is ambiguous: a/twin, b/twin. Use one of these." in refusal("twin")


def test_own_configs_come_before_those_that_came_with_the_package(write: Write) -> None:
    write("configs/train/demo.yaml", "run: {name: mine}\n")
    assert load_run_config("train/demo").run.name == "mine"


def test_a_rule_that_stands_twice_is_refused_where_it_stands(write: Write) -> None:
    write("x.yaml", "data:\n  rules:\n    - kind: c4\n    - kind: gopher_quality\n    - kind: c4\n")
    assert "data.rules.2: c4 is already the name of rules.0" in refusal("x.yaml")
