"""Profiles of training programs: shipped ones load, a person adds one, and what is wrong is
named.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.loading.load import read_config
from llmsys.errors import ConfigError
from llmsys.estimate.program_profile import MAX_BASES, list_program_names, load_program_profile
from llmsys.launch.main import main

WORDS = (
    "estimate",
    "model/llama3.2-1b",
    "batch.sequence_length=2048",
    "batch.sequences=64",
    "--device",
    "h100-sxm",
)
README = Path("llmsys") / "estimate" / "README.md"


def price(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main([*WORDS, "--gpus", "8", "--json", *words]) == 0
    found: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_person_adds_a_program_over_a_shipped_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "base: megatron\nname: mine\ndescription: Slower traffic.\ntime: {traffic: 4}\nmemory: "
        "{loss: whole}\n"
    )
    slow, shipped = (
        price(capsys, "--program", name, "--layout", "tp=2,dp=4")
        for name in (str(mine), "megatron")
    )
    assert slow["time"]["program"] == "mine"
    slower = [
        one["time"]["parts_seconds"]["elementwise"] / one["time"]["residual_factor"]
        for one in (slow, shipped)
    ]
    assert slower[0] > 3 * slower[1]
    assert slow["memory"]["peak_bytes"] > shipped["memory"]["peak_bytes"]
    # The factor of another program is none of this one.
    assert load_program_profile(str(mine)).fit == {}
    assert "dense" in load_program_profile("megatron").fit


def test_the_rate_of_a_programs_attention_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "base: megatron\nname: mine\ndescription: Older kernels.\ntime: {attention_rate: 0.5}\n"
    )
    slow, shipped = (
        price(capsys, "--program", name, "--layout", "dp=8") for name in (str(mine), "megatron")
    )
    seconds = [
        one["time"]["parts_seconds"]["attention"] / one["time"]["residual_factor"]
        for one in (slow, shipped)
    ]
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_a_named_layout_takes_the_kind_of_context_parallelism_of_the_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--program", "megatron", "--layout", "tp=8,cp=8,dp=1", "batch.sequence_length=8192")
    assert main([*WORDS, "--gpus", "64", *words]) != 0
    assert (
        "32 attention heads cannot be divided over context=8 × tensor=8 ranks"
        in capsys.readouterr().err
    )
    assert main([*WORDS, "--gpus", "64", "--json", *words, "layout.context_kind=ring"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["ranks"] == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: x\ndescription: y\nmemory: {lost: whole}",
            "memory.lost is no field of a memory profile. Use ",
        ),
        (
            "name: x\ndescription: y\nmemory: {loss: gone}",
            "mine.yaml:3: memory.loss: gone is not one of its values. Use 'kernel', ",
        ),
        ("name: x\ndescription: y\ntime: {traffic: 0.5}", "traffic"),
        (
            "name: x\ndescription: y\nassumed: {loss: seen}",
            "assumed.loss names no value of memory or pipelined_memory",
        ),
        (
            "base: megatrom\nname: x",
            "'megatrom' has no program profile, and no other profile is used instead",
        ),
        (
            "base: mine.yaml\nname: x",
            f"base=mine.yaml is the last of more than {MAX_BASES} bases. Remove a circle.",
        ),
        ("[1, 2]", "is not a program profile. Start with `base: llmsys`"),
    ],
)
def test_a_wrong_profile_is_rejected_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_program_profile(str(path))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--program", "megatronn"), "Did you mean megatron"),
        (
            ("engine.data_parallel=fsdp", "--layout", "tp=2,dp=4"),
            "--layout tp=2,dp=4 is for other programs. Give llmsys layout.tensor=8",
        ),
        (("--program", "megatron", "--layout", "tp=2,dp=8"), "is 16 devices, and there are 8"),
        (
            ("--program", "megatron", "--layout", "tp=3,dp=1", "--gpus", "3"),
            "attention heads cannot be divided",
        ),
        (
            ("--program", "megatron", "--layout", "vp=2,dp=8"),
            "vp=2 stages on each rank need a pipeline. Add pp=2",
        ),
        (
            ("--program", "hai-llm-v3", "--layout", "pp=3,dp=1", "--gpus", "3"),
            "pipeline=3 cannot be divided into pairs of",
        ),
        (
            ("--program", "hai-llm-v3", "--layout", "pp=2,vp=2,dp=4"),
            "has two stages on each rank, and no interleave=2",
        ),
        (
            ("--program", "megatron", "batch.micro_sequences=3"),
            "does not divide the 8 sequences of a rank. Use 2.",
        ),
        (
            ("train.tokens=200000", "--documents", "200001"),
            "a document is longer than the 200000 tokens of the run",
        ),
        (
            ("hidden_size=999999999999999999",),
            "999999999999999999 is too large for a size that is divided",
        ),
        (
            ("vocab_size=999999999999999999",),
            "999999999999999999 is too large: the maximum is 1e+12. Use 1e+12",
        ),
        (
            ("train.tokens=1e30",),
            "train.tokens: 1e+30 is too large for a whole number: the maximum has 18 digits",
        ),
        (("--device", ""), "'' has no device profile, and no other profile is used instead"),
        (("--price-per-hour", "-1"), "--price-per-hour -1.0 is too small: the minimum is 0"),
        (
            ("--price-per-hour", "1e30"),
            "--price-per-hour 1e+30 is too large: the maximum is 10000000",
        ),
        (("--price-per-hour", "nan"), "--price-per-hour nan is too small: the minimum is 0"),
    ],
)
def test_what_a_program_cannot_do_is_rejected(words: tuple[str, ...], message: str, capsys) -> None:
    assert main([*WORDS, "--gpus", "8", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_search_keeps_what_is_named_and_is_no_slower(capsys: pytest.CaptureFixture[str]) -> None:
    found = price(capsys, "--program", "megatron", "--layout", "tp=2,auto")
    assert found["memory"]["layout"]["tensor"] == 2
    free = price(capsys, "--program", "megatron", "--layout", "auto")
    named = price(capsys, "--program", "megatron", "--layout", "dp=8", "batch.micro_sequences=1")
    assert free["time"]["step_seconds"]["p50"] <= min(
        one["time"]["step_seconds"]["p50"] for one in (found, named)
    )
    assert main([*WORDS[:4], "--program", "megatron", "--layout", "auto"]) == 2
    assert (
        "--layout auto needs the devices. Add --device NAME and --gpus N."
        in capsys.readouterr().err
    )


def test_the_readme_names_every_program(repository: Path) -> None:
    text = (repository / README).read_text()
    assert [name for name in list_program_names() if f"`{name}`" not in text] == []


def test_gradients_that_are_summed_whole_are_an_engine_of_a_program() -> None:
    profile = load_program_profile("fsdp2")
    config = read_config("model/llama3.2-1b", ()).run
    engine = profile.select_engine(config, 1)
    assert engine == TorchEngineConfig(data_parallel="fsdp", gradient_accumulation="whole")
    assert not engine.reduces_each_micro_batch
