"""Objects that estimate, plan and scale print with --json have exactly the keys that the
documentation describes.
"""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from llmsys.launch.main import main
from tools.docs.json_reference import OUTPUTS, build_schema, format_page, iter_schemas

BATCH = ["batch.sequence_length=2048", "batch.sequences=16"]
COMMANDS = {
    "a bare model": ("estimate", ["estimate", "model/gpt2-small"]),
    "a priced run of experts": (
        "estimate",
        ["estimate", "model/olmoe-1b-7b", *BATCH, "train.tokens=1e9", "--device", "h100-sxm",
            "--gpus", "8"],
    ),
    "another program": (
        "estimate",
        ["estimate", "model/llama3.2-1b", *BATCH, "--program", "megatron", "--layout",
            "tp=2,pp=2,dp=2", "--device",
         "h100-sxm", "--explain", "--documents", "512"],
    ),
    "a pair model": ("estimate", ["estimate", "train/wmt14-base"]),
    "adapters": ("estimate", ["estimate", "train/llama-8b-8xh100", "--finetune", "rank=8",
        "--device", "h100-sxm"]),
    "serving without a device": ("estimate-serve", ["estimate", "model/gpt2-small", "--serve",
        "prompt=100,output=10"]),
    "serving": (
        "estimate-serve-device",
        ["estimate", "model/llama3.1-8b", "--serve", "batch=2,weights=fp8", "--device", "h100-sxm",
            "--gpus", "2"],
    ),
    "a plan": (
        "plan",
        ["plan", "model/llama3.2-1b", "gpus=2", "device=h100-sxm", "program=megatron",
            "train.tokens=1e9", *BATCH],
    ),
    "an illegal layout": ("plan-check", ["plan", "model/llama3.1-405b", "gpus=16384", "--check",
        "tp=8,dp=4"]),
    "a layout that rests on an assumption": (
        "plan-check",
        ["plan", "model/llama3.2-1b", "gpus=4", "device=h100-sxm", "program=llama3", *BATCH,
            "--check", "pp=2,dp=2"],
    ),
    "a layout that is compared": (
        "plan-check",
        ["plan", "model/llama3.2-1b", "gpus=2", "device=h100-sxm", *BATCH, "--check", "dp=2",
            "--compare"],
    ),
    "laws": ("scale", ["scale", "budget=1e21", "unique_tokens=1e10", "serve_tokens=1e9"]),
    "laws of experts": ("scale", ["scale", "budget=1e21", "num_experts=64"]),
}  # fmt: skip


def print_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("name", "words"), COMMANDS.values(), ids=COMMANDS)
def test_every_printed_key_is_in_the_schema_and_every_required_one_is_printed(
    name, words, capsys
) -> None:
    printed = print_json(words, capsys)
    schema = build_schema(name)
    Draft202012Validator.check_schema(schema)
    assert [error.message for error in Draft202012Validator(schema).iter_errors(printed)] == []
    # The schema is strict: a key that nobody described is an error.
    assert not Draft202012Validator(schema).is_valid(printed | {"surprise": 1})


def test_every_output_has_a_page_and_a_schema_file() -> None:
    page, schemas = format_page(), dict(iter_schemas())
    for name, model in OUTPUTS.items():
        assert json.loads(schemas[f"reference/{name}.schema.json"])["title"] == model.__name__
        assert f"`{name}.schema.json`" in page
        assert all(f"`{key}`" in page for key in model.model_fields)
