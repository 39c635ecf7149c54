"""A Hugging Face folder comes back from ours byte for byte, and transformers loads what a run of
ours is written as.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.loading.load import load_run_config
from llmsys.config.patches import PatchesConfig
from llmsys.convert.folders import KEPT
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.convert.safetensors_folder import INDEX, SafetensorsFolder
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.train.trained_model import load_trained_model
from tests.helpers.transformers_models import CASES, build, build_images

transformers = pytest.importorskip("transformers")
# A table of sines, which the class computes where a file has none.
COMPUTED = {"roformer.encoder.embed_positions.weight"}
PLAIN = [case for case in CASES if "," not in case]


def saved(case: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    model = build(case).to(dtype)
    model.save_pretrained(folder, **options)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_comes_back_byte_for_byte(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "theirs", max_shard_size="9KB")
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"version": "1.0"}')
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "theirs" / INDEX).is_file()
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")


@pytest.mark.parametrize("case", PLAIN)
def test_transformers_loads_what_a_run_of_ours_is_written_as(case: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path / "theirs", torch.float32)
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    shutil.rmtree(tmp_path / "ours" / KEPT)  # as if it had been trained here
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "export", shard_bytes=20_000)
    loaded, report = type(theirs).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert set(report["missing_keys"]) <= COMPUTED
    assert not any(report[kind] for kind in ("unexpected_keys", "mismatched_keys"))
    for name, value in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    if case == "vit":
        _, pixels = build_images(PatchesConfig(image_size=12, patch_size=4), 2)
        torch.testing.assert_close(
            loaded.eval()(pixels).logits, theirs(pixels).logits, atol=1e-5, rtol=1e-5
        )
        return
    tokens = torch.arange(3, 40)[None]
    decoder = {"decoder_input_ids": tokens} if loaded.config.is_encoder_decoder else {}
    expected = theirs(input_ids=tokens, **decoder).logits
    torch.testing.assert_close(
        loaded.eval()(input_ids=tokens, **decoder).logits, expected, atol=1e-5, rtol=1e-5
    )


def test_shards_hold_no_more_than_asked_for(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs", torch.float32)
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "back", shard_bytes=5_000)
    files = list((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 5_000 + 1_500 for path in files)  # the header comes on top
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(
        one.nbytes for one in SafetensorsFolder(tmp_path / "back").tensors.values()
    )


def test_the_dtype_of_every_tensor_survives_and_masters_are_exact(tmp_path: Path) -> None:
    model = build("deepseek_v3").to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()  # as published: one fp32 tensor among bf16
    model.save_pretrained(tmp_path / "theirs")
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    config = load_run_config(str(tmp_path / "ours" / "config.yaml"), ["train.precision=fp32"])
    ours, _ = load_trained_model(config)
    assert torch.equal(ours.embed.weight.to(torch.bfloat16), model.get_input_embeddings().weight)
    assert ours.embed.weight.dtype == torch.float32
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")


def test_old_names_copies_and_unused_tables_come_back_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("gpt2", tmp_path / "theirs", torch.float32)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")


def test_a_language_model_is_read_from_files_that_have_one_of_images_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("qwen3_5_text", tmp_path / "theirs", torch.float32)
    file = tmp_path / "theirs" / "model.safetensors"
    inner = re.compile(r"^model\.(language_model\.)?")
    tensors = {
        inner.sub("model.language_model.", name): value for name, value in load_file(file).items()
    }
    tensors["model.visual.norm.weight"] = tensors["mtp.norm.weight"] = torch.ones(3)
    save_file(
        {name: value.clone() for name, value in tensors.items()}, file, metadata={"format": "pt"}
    )
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    ours, _ = load_trained_model(
        load_run_config(str(tmp_path / "ours" / "config.yaml"), ["train.precision=fp32"])
    )
    embedding = tensors["model.language_model.embed_tokens.weight"]
    assert torch.equal(ours.embed.weight, embedding)
    convert_to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")


def test_what_a_folder_holds_beyond_its_config_is_built_and_comes_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("bert, pretraining", tmp_path / "bert", torch.float32)
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(
        json.dumps(config | {"architectures": ["BertForMaskedLM"]})
    )
    saved("deepseek_v3", tmp_path / "deepseek", torch.float32)
    file = tmp_path / "deepseek" / "model.safetensors"
    tensors = load_file(file)
    # As published: one more block of experts, two norms, a projection of both, and copies of
    # embedding and head.
    last = {key: value for key, value in tensors.items() if key.startswith("model.layers.2.")}
    tensors |= {key.replace("layers.2.", "layers.3."): value + 1 for key, value in last.items()}
    more = {
        "enorm.weight": (16,),
        "hnorm.weight": (16,),
        "shared_head.norm.weight": (16,),
        "eh_proj.weight": (16, 32),
    }
    tensors |= {f"model.layers.3.{name}": torch.randn(shape) for name, shape in more.items()}
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    for name in ("bert", "deepseek"):
        convert_from_hugging_face(tmp_path / name, tmp_path / f"{name}_ours")
        convert_to_hugging_face(tmp_path / f"{name}_ours", tmp_path / f"{name}_back")
        assert contents(tmp_path / f"{name}_back") == contents(tmp_path / name)
    models = [
        load_run_config(str(tmp_path / f"{name}_ours" / "config.yaml")).model
        for name in ("bert", "deepseek")
    ]
    assert models[0].head.pooler
    assert models[0].head.next_sentence
    assert models[1].multi_token_prediction.depth == 1
