"""A config.json with an impossible number of layers is answered before any list is built."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsys.launch.main import main

GIB = 2**30
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """A list of a billion entries does not fit: it is a MemoryError instead of a slow machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("verb", ["show", "estimate"])
@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("qwen3", "num_hidden_layers"),
        ("gemma2", "num_hidden_layers"),
        ("gpt2", "n_layer"),
        ("t5", "num_decoder_layers"),
        ("bart", "encoder_layers"),
        ("deepseek_v3", "first_k_dense_replace"),
        ("deepseek_v32", "num_hidden_layers"),
        ("kimi_linear", "num_hidden_layers"),
        ("mamba", "num_hidden_layers"),
        ("jamba", "num_hidden_layers"),
        ("phi3", "num_hidden_layers"),
    ],
)
@pytest.mark.usefixtures("limited_memory")
def test_a_billion_layers_are_refused_with_value_and_limit(
    model_type: str,
    key: str,
    verb: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = LLAMA | {"model_type": model_type, key: 10**9}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main([verb, str(tmp_path)]) == 2
    answer = capsys.readouterr().err
    assert f"config.json: {key}: 1000000000 layers are more than the maximum of 100,000" in answer


@pytest.mark.usefixtures("limited_memory")
def test_an_import_refuses_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 10**9}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(values))
    (source / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    assert main(["convert", str(source), str(tmp_path / "made")]) == 2
    assert "more than the maximum of 100,000" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
