"""What does not fit is named before anything is written, and nothing half-written is ever left
under the final name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmsys.convert import from_hugging_face
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.convert.safetensors_folder import INDEX
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.errors import CheckpointError, ConfigError, LlmsysError
from tests.helpers.transformers_models import build

pytest.importorskip("transformers")
K = "model.layers.1.self_attn.k_proj.weight"
Tensors = dict[str, Tensor]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def changed(source: Path, change: Callable[[Tensors], Any]) -> None:
    file = source / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refused(source: Path, kind: type[LlmsysError] = CheckpointError) -> str:
    destination = source.parent / "ours"
    with pytest.raises(kind) as error:
        convert_from_hugging_face(source, destination)
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    return str(error.value)


def test_a_missing_tensor_is_named_with_its_shape(source: Path) -> None:
    changed(source, lambda tensors: tensors.pop(K))
    assert f"{K} (8, 16) is missing" in refused(source)


def test_an_extra_tensor_is_named_with_its_shape(source: Path) -> None:
    changed(
        source,
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(3, 4)}),
    )
    assert "model.layers.2.mlp.up_proj.weight (3, 4) is not part of the model" in refused(source)


def test_another_shape_is_named_beside_the_right_one(source: Path) -> None:
    changed(source, lambda tensors: tensors.update({K: torch.ones(16, 16)}))
    assert f"{K} has shape (16, 16), the config needs (8, 16)" in refused(source)


def test_many_differences_are_counted(source: Path) -> None:
    changed(source, lambda tensors: [tensors.pop(name) for name in list(tensors)[:9]])
    assert "… and 4 more" in refused(source)


def test_two_values_of_a_tied_tensor_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    build("llama, tied").save_pretrained(source)
    changed(source, lambda tensors: tensors.update({"lm_head.weight": torch.ones(48, 16)}))
    assert "lm_head.weight in" in (message := refused(source))
    assert "differs from model.embed_tokens.weight" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_need_a_scale_are_refused(source: Path, dtype: torch.dtype) -> None:
    changed(source, lambda tensors: tensors.update({K: tensors[K].to(dtype)}))
    message = refused(source)
    assert (
        f"{K} in {source} is stored as {str(dtype).removeprefix('torch.')}, without scales that "
        "are read"
    ) in message
    assert "Use weights in float64, float32, float16 or bfloat16." in message


def test_shards_without_their_index_say_so(source: Path) -> None:
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    message = (
        f"{source} holds model-00001-of-00002.safetensors but neither model.safetensors nor "
        f"{INDEX}."
    )
    assert message in refused(source)


def test_experts_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    source, name = tmp_path / "theirs", "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    build("mixtral").save_pretrained(source)
    changed(source, lambda tensors: tensors.update({name: tensors[name].half()}))
    assert "are torch.float32 and torch.float16" in refused(source)


def test_a_damaged_file_and_a_missing_shard_are_named(source: Path, tmp_path: Path) -> None:
    file = source / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    assert f"{file} is corrupt" in refused(source)
    file.write_bytes(whole)
    (source / INDEX).write_text(json.dumps({"weight_map": {K: "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors is missing" in refused(source)
    (source / INDEX).write_text("{}")
    assert f"{source / INDEX} cannot be read" in refused(source)


def test_weights_in_another_format_are_named_with_the_way_out(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "holds pytorch_model.bin and no *.safetensors" in refused(source)


def test_an_unknown_family_is_refused_by_name(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))
    assert "'rwkv' is not supported" in refused(source, ConfigError)


def test_nothing_is_written_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").touch()
    with pytest.raises(ConfigError, match="exists already"):
        convert_from_hugging_face(source, tmp_path / "ours")


def test_a_conversion_that_dies_leaves_nothing_and_can_be_repeated(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(from_hugging_face.HuggingFaceImport, "read_tensor", full)
        with pytest.raises(OSError, match="No space left"):
            convert_from_hugging_face(source, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    (tmp_path / ".ours.partial").mkdir()  # of one that was killed
    convert_from_hugging_face(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_a_damaged_checkpoint_and_a_folder_of_neither_kind_are_refused(
    source: Path, tmp_path: Path
) -> None:
    convert_from_hugging_face(source, tmp_path / "ours")
    checkpoint = tmp_path / "ours" / "checkpoints" / "step-00000000"
    data = next(checkpoint.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        convert_to_hugging_face(tmp_path / "ours", tmp_path / "back")
    with pytest.raises(CheckpointError, match="is damaged"):
        convert_to_hugging_face(checkpoint, tmp_path / "back")
    with pytest.raises(ConfigError, match=r"neither a Hugging Face folder .* nor a run folder"):
        convert_to_hugging_face(tmp_path, tmp_path / "back")


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor(
    source: Path, tmp_path: Path
) -> None:
    ours = convert_from_hugging_face(source, tmp_path / "ours")
    text = (ours / "config.yaml").read_text()
    (ours / "config.yaml").write_text(
        text.replace("intermediate_size: 24", "intermediate_size: 32", 1)
    )
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight has shape \(24, 16\), .* needs \(32, 16\)"
    ):
        convert_to_hugging_face(ours, tmp_path / "back")


def test_weights_alone_are_no_place_to_resume(source: Path, tmp_path: Path) -> None:
    from llmsys.train.checkpoint_load import load_checkpoint

    ours = convert_from_hugging_face(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"weights only.*train\.init_from="):
        load_checkpoint(None, ours / "checkpoints" / "step-00000000")  # type: ignore[arg-type]
