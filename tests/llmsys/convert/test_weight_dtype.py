"""Laws of dtypes: quantized folders are read as transformers dequantizes them, and weights are
written as asked.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmsys.config.loading.load import load_run_config
from llmsys.convert.folders import KEPT
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.convert.quantized_folder import dequantize_fp8, dequantize_mxfp4
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.convert.weight_dtype import cast_weight
from llmsys.errors import CheckpointError, ConfigError
from llmsys.launch.commands.train import require_export
from llmsys.launch.main import main
from tests.helpers.transformers_models import LLAMA, LOCAL_EXPERTS, build

transformers = pytest.importorskip("transformers")


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_fp8_blocks_are_read_as_transformers_dequantizes_them(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    torch.manual_seed(0)
    build("deepseek_v3").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors, expected = load_file(file), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        scale = torch.rand(-(-rows // 8), -(-columns // 8)) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        expected[name] = _dequantize_fp8_weight(tensors[name], scale, [8, 8], torch.float32).to(
            torch.bfloat16
        )
    save_file(tensors, file, metadata={"format": "pt"})
    change_config(
        tmp_path / "theirs",
        quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]},
    )
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "back")
    back = read(tmp_path / "back")
    assert len(expected) > 10
    assert all(torch.equal(back[name], value) for name, value in expected.items())
    # what is written is not quantized any more
    assert not any(name.endswith("scale_inv") for name in back)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    change_config(
        tmp_path / "theirs",
        quantization_config={"quant_method": "fp8", "weight_block_size": [4, 4]},
    )
    with pytest.raises(
        CheckpointError, match=r"blocks of \[4, 4\] need \(\d+, \d+\)\. Correct weight_block_size"
    ):
        convert_from_hugging_face(tmp_path / "theirs", tmp_path / "wrong")
    whole, one = torch.randn(3, 5).to(torch.float8_e4m3fn), torch.tensor(0.25)
    assert torch.equal(dequantize_fp8(whole, one, None), whole.float() / 4)


def test_mxfp4_experts_are_read_as_transformers_dequantizes_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8, "sliding_window": 8}
    config = transformers.GptOssConfig(**LLAMA | LOCAL_EXPERTS | sizes)
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors, expected = load_file(file), {}
    for name in [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert torch.equal(dequantize_mxfp4(blocks, scales).to(torch.bfloat16), expected[name])
    save_file(tensors, file, metadata={"format": "pt"})
    change_config(tmp_path / "theirs", quantization_config={"quant_method": "mxfp4"})
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "back")
    back = read(tmp_path / "back")
    assert len(expected) == 4
    assert all(torch.equal(back[name], value) for name, value in expected.items())


def test_weights_are_written_in_the_dtype_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("deepseek_v3").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    assert (
        main(["convert", str(tmp_path / "theirs"), str(tmp_path / "wide"), "--dtype", "float32"])
        == 0
    )
    assert (
        main(["convert", str(tmp_path / "wide"), str(tmp_path / "back"), "--dtype", "source"]) == 0
    )
    theirs, back = read(tmp_path / "theirs"), read(tmp_path / "back")
    for name, value in theirs.items():
        assert back[name].dtype == value.dtype, name
        assert torch.equal(back[name].float(), value.float()), name
    # The dtype of the original is stated as there.
    stated = (tmp_path / "back" / "config.json").read_bytes()
    assert stated == (tmp_path / "theirs" / "config.json").read_bytes()
    convert_to_hugging_face(tmp_path / "wide", tmp_path / "half", dtype="float16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert loaded.dtype == torch.float16
    # router biases stay wide where another dtype is asked for: they choose experts
    assert {name: value.dtype for name, value in read(tmp_path / "half").items()} == {
        name: torch.float32 if "correction_bias" in name else torch.float16 for name in theirs
    }
    with pytest.raises(
        CheckpointError,
        match=r"w has the value 7e\+04, and float16 ends at 65504\. Use --dtype bfloat",
    ):
        cast_weight("w", torch.tensor([7e4]), torch.float16)
    (tmp_path / "wide" / KEPT / "record.json").unlink()
    with pytest.raises(
        ConfigError, match=r"--dtype source: .* neither was imported .* Name one: --dtype float32, "
    ):
        convert_to_hugging_face(tmp_path / "wide", tmp_path / "none", dtype="source")
    convert_to_hugging_face(tmp_path / "wide", tmp_path / "own")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "own")
    assert (found.do_sample, found.temperature, found.top_p, found.max_new_tokens) == (
        True,
        0.8,
        1.0,
        64,
    )


def test_an_export_that_would_fail_is_refused_before_the_run(tmp_path: Path) -> None:
    config = load_run_config("train/llama-1b-1xh200")
    with pytest.raises(
        ConfigError, match=r"--dtype float16 is for the exported weights\. Give --export FOLDER"
    ):
        require_export(config, None, "float16")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ConfigError, match=r"--export .*full exists already"):
        require_export(config, tmp_path / "full", None)
    with pytest.raises(
        ConfigError,
        match=r"No Hugging Face model type can represent this model\. .* model\.residual\.kind=",
    ):
        require_export(load_run_config("train/gpt1-tiny"), tmp_path / "new", None)
    require_export(config, tmp_path / "new", "bfloat16")
