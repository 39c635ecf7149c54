"""Mistakes of an ablation are said before any work, with the value and the next step."""

import re
from pathlib import Path
from typing import Any

import pytest

from llmsys.ablation.plan import BASE, build_plan
from llmsys.ablation.record import open_record, save_record
from llmsys.config.loading.yaml_files import dump_yaml
from llmsys.errors import ConfigError, DataError, FormatError, LlmsysError
from tests.helpers.tiny_crawl import make_crawl


def write_configs(folder: Path, **variants: Any) -> tuple[str, list[str]]:
    make_crawl(folder / "crawl", files=1, pages=3)
    base = {
        "data": {"inputs": [f"{folder}/crawl/*.warc.gz"], "split": {"heldout_fraction": 0.2}},
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 400},
        "model": {
            "vocab_size": 400,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "batch": {"sequence_length": 32, "sequences": 4},
        "train": {"tokens": 512},
        "schedule": {"warmup_tokens": 128},
    }
    (folder / "start.yaml").write_text(dump_yaml(base))
    for name, values in variants.items():
        (folder / f"{name}.yaml").write_text(dump_yaml(values))
    return str(folder / "start.yaml"), [str(folder / f"{name}.yaml") for name in variants]


STRICT = {"data": {"language": {"min_score": 0.9}}}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "another model": (
        {"one": {"model": {"hidden_size": 64}}},
        "model.hidden_size is 32 in the base and 64 here. Variants share model and recipe",
    ),
    "another rate": (
        {"one": STRICT | {"optimizer": {"learning_rate": 0.1}}},
        "optimizer.learning_rate is .* Leave it out, or set it in the base",
    ),
    "another split": (
        {"one": STRICT | {"data": {"split": {"seed": 7}}}},
        "data.split.seed is 0 in the base and 7 here. It decides which pages are held out",
    ),
    "other inputs": ({"one": {"data": {"inputs": ["x"]}}}, "data.inputs is .* held out"),
    "another order": (
        {"one": {"data": {"tokens": {"seed": 7}}}},
        "data.tokens.seed is 0 .* changes no document",
    ),
    "another kind": (
        {"one": {"data": {"kind": "mixture", "sources": [{"folder": "a"}]}}},
        "data.kind is crawl in the base and mixture here",
    ),
    "nothing": ({"one": {"run": {"name": "x"}}}, "variants base and one have the same data"),
    "twice the same": ({"one": STRICT, "two": STRICT}, "variants one and two have the same data"),
    "a taken name": ({"base": STRICT}, "base is the name of the base itself"),
    "an unknown key": ({"one": {"data": {"rulez": []}}}, "one.yaml:2: data.rulez: unknown key"),
    "a model that cannot be built": (
        {"one": {"model": {"num_attention_heads": 5}}},
        "num_attention_heads|hidden_size",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_variant_that_cannot_be_compared_is_named_with_the_rule(
    case: str, tmp_path: Path
) -> None:
    variants, said = MISTAKES[case]
    base, files = write_configs(tmp_path, **variants)
    with pytest.raises(LlmsysError, match=said):
        build_plan(base, files, [], tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


BASES = {
    "objective.kind=masked has no bits per byte": [
        "model.head.kind=mlm",
        "model.family=encoder",
        "tokenizer.control_symbols=[<mask>]",
    ],
    "data.split.heldout_fraction=0 holds out no page": ["data.split.heldout_fraction=0"],
    "data.kind=mixture has no rules": ["data={kind: mixture, sources: [{folder: a}]}"],
    "no-such.warc": ["data.inputs=[no-such.warc]"],
}


@pytest.mark.parametrize("said", BASES)
def test_a_base_without_anything_to_compare_on_is_named(said: str, tmp_path: Path) -> None:
    base, files = write_configs(tmp_path, one=STRICT)
    with pytest.raises(LlmsysError, match=re.escape(said)):
        build_plan(base, files, BASES[said], tmp_path / "out", 2)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("wiki", "is not NAME=PATH"),
        ("pages=x.jsonl", "there is a held-out set pages already"),
        ("wiki=none.jsonl", "none.jsonl"),
    ],
)
def test_a_wrong_held_out_set_is_named(word: str, said: str, tmp_path: Path) -> None:
    base, files = write_configs(tmp_path, one=STRICT)
    with pytest.raises(LlmsysError, match=said):
        build_plan(base, files, [], tmp_path / "out", 2, [word])


def test_a_variant_is_merged_over_the_base_below_the_overrides(tmp_path: Path) -> None:
    base, files = write_configs(tmp_path, one=STRICT, two=STRICT)
    (tmp_path / "two.yaml").write_text(
        dump_yaml({"base": "start.yaml", "data": {"unicode": {"kind": "ftfy"}}})
    )
    plan = build_plan(base, files, ["train.tokens=1024", "run.seed=5"], tmp_path / "out", 2)
    assert list(plan.variants) == [BASE, "one", "two"]
    assert list(plan.seeds) == [5, 6]
    assert [config.train.tokens for config in plan.variants.values()] == [1024] * 3
    one, two = plan.get_data("one"), plan.get_data("two")
    assert (one.language.min_score, two.unicode.kind) == (0.9, "ftfy")
    assert (one.folder, one.inputs) == (tmp_path / "out" / "data" / "one", two.inputs)
    shared = plan.build_config("one").tokenizer
    assert shared == plan.build_config("two").tokenizer
    assert shared.path == plan.get_data(BASE).folder / "tokenizer"


def test_a_record_belongs_to_one_base_and_its_variants_may_become_more(tmp_path: Path) -> None:
    base, files = write_configs(tmp_path, one=STRICT, two={"data": {"pii": {"kind": "replace"}}})
    out = tmp_path / "out"

    def plan(count: int = 1, *words: str, seeds: int = 2) -> Any:
        return build_plan(base, files[:count], words, out, seeds)

    save_record(open_record(plan()), out)
    assert list(open_record(plan(2, seeds=3)).variants) == [BASE, "one", "two"]
    with pytest.raises(ConfigError, match=r"recipe.train.tokens was 512, now 1024"):
        open_record(plan(1, "train.tokens=1024"))
    (tmp_path / "one.yaml").write_text(dump_yaml({"data": {"language": {"min_score": 0.8}}}))
    with pytest.raises(ConfigError, match=r"variant one in which data.language.min_score was 0.9"):
        open_record(plan())
    (out / "ablation.json").write_text('{"format_version": 7}')
    with pytest.raises(FormatError, match="ablation format 7"):
        open_record(plan())
    (out / "ablation.json").write_text('{"format_version": 1, "x": 2}')
    with pytest.raises(DataError, match=r"is damaged: .*Remove it, and give the same command"):
        open_record(plan())
