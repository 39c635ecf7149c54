"""An export that is promised before the run is the one that `llmsys convert` writes, for every
shipped training config, and its logits are those of the run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.export.exported_model import (
    ExportPromise,
    NoExportError,
    build_export_promise,
    choose_run_export,
)
from llmsys.config.loading.config_files import format_recorded_config
from llmsys.config.loading.load import (
    load_run_config,
)
from llmsys.config.run import RunConfig
from llmsys.convert.conversion_plan import build_conversion_plan
from llmsys.convert.exported_logits import compare_exported_logits
from llmsys.convert.exported_weights import ROTATED
from llmsys.convert.family_mappings import TABLES, get_family_mapping
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.engine.engine import iter_persistent_buffers
from llmsys.errors import ConfigError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.hugging_face.families import FAMILIES
from llmsys.launch.main import main
from llmsys.model.transformer import Transformer
from llmsys.train.checkpoint_write import publish_weights, save_tensors
from tests.helpers.paths import CONFIGS as FOLDER
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model, build_tiny_moe_config

transformers = pytest.importorskip("transformers")

CONFIGS = sorted(
    f"{folder}/{file.stem}"
    for folder in ("train", "recipes")
    for file in (FOLDER / folder).glob("*.yaml")
)
PROMISES: dict[str, ExportPromise] = {
    name: build_export_promise(load_run_config(name)) for name in CONFIGS
}
EXPORTED = [name for name, promise in PROMISES.items() if promise.model_type is not None]
REFUSED = [name for name in CONFIGS if name not in EXPORTED]
SMALL = [
    name for name in EXPORTED if count_parameters(load_run_config(name).model).total < 20_000_000
]


def write_random_run(config: RunConfig, folder: Path, module: Transformer | None = None) -> Path:
    """A run folder with random weights, as training would leave it."""
    torch.manual_seed(0)
    model = Transformer(config.model) if module is None else module
    tensors = {f"parameter/{name}": value.detach() for name, value in model.named_parameters()}
    tensors |= {f"buffer/{name}": value for name, value in iter_persistent_buffers(model)}
    publish_weights(folder / "checkpoints", lambda at: save_tensors(tensors, at))
    (folder / "config.yaml").write_text(format_recorded_config(config.model_dump(mode="json")))
    return folder


def build_run(model: Any, **train: Any) -> RunConfig:
    settings = {
        "model": model.model_dump(mode="json"),
        "batch": {"sequence_length": 32},
        "tokenizer": {"kind": "file", "path": "tokenizer.json"},
    }
    return RunConfig.model_validate(settings | {"train": train})


def test_experts_and_dense_models_of_the_shipped_configs_are_exported() -> None:
    assert PROMISES["train/demo"].line == "exports to Hugging Face as ernie4_5_moe"
    assert PROMISES["recipes/moe"].model_type == "ernie4_5_moe"
    assert PROMISES["recipes/mla"].model_type == "deepseek_v3"
    assert PROMISES["train/deepseek-v2-tiny"].model_type == "deepseek_v2"
    assert PROMISES["train/mup-tiny"].model_type == "llama"


@pytest.mark.parametrize("name", SMALL)
def test_the_promised_type_is_written_and_computes_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_run_config(name)
    run = write_random_run(config, tmp_path / "run")
    assert main(["convert", str(run), str(tmp_path / "exported"), "--json"]) == 0
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert written["model_type"] == PROMISES[name].model_type
    logits = json.loads(capsys.readouterr().out)["logits"]
    if config.model.patches is None:
        assert logits["largest_difference"] <= 1e-4 * logits["largest_logit"]
    else:
        assert logits == {
            "skipped": "model.head.kind=classification does not predict tokens of a text"
        }


@pytest.mark.parametrize("name", EXPORTED)
def test_every_tensor_of_a_promised_export_has_a_name_and_a_place(name: str) -> None:
    choice = choose_run_export(load_run_config(name))
    plan = build_conversion_plan(choice.model, get_family_mapping(choice.model_type, choice.model))
    config = transformers.AutoConfig.for_model(**choice.values)
    with torch.device("meta"):
        built = getattr(transformers, choice.values["architectures"][0])(config)
    parts = {part.name: part.shape for group in plan.groups for part in group.ours}
    ours = {key: shape for key, shape in parts.items() if key.startswith("parameter/")}
    theirs = sum(one.numel() for one in built.parameters() if one.requires_grad)
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_export_is_refused_by_convert_for_the_same_reasons(
    name: str, tmp_path: Path
) -> None:
    config = load_run_config(name)
    promise = PROMISES[name]
    checkpoint = publish_weights(
        tmp_path / "checkpoints", lambda at: save_tensors({"a": torch.ones(1)}, at)
    )
    (tmp_path / "config.yaml").write_text(format_recorded_config(config.model_dump(mode="json")))
    with pytest.raises(NoExportError) as caught:
        convert_to_hugging_face(checkpoint, tmp_path / "exported")
    assert caught.value.obstacles == promise.obstacles
    assert promise.obstacles
    for one in promise.obstacles:
        assert f"model.{one.key}=" in promise.line
        assert f"model.{one.key}=" in str(caught.value)
    with pytest.raises(ConfigError, match=r"train\.must_export: true, and the model does not exp"):
        load_run_config(name, ["train.must_export=true"])


def test_show_estimate_and_train_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train/demo", "train/gpt1-tiny"):
        line = PROMISES[name].line
        assert main(["show", name]) == 0
        assert f"# {line}\n" in capsys.readouterr().out
        assert main(["estimate", name]) == 0
        assert f"\n{line}\n" in capsys.readouterr().out
        assert main(["show", name, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["export"]
        assert main(["estimate", name, "--json"]) == 0
        estimated = json.loads(capsys.readouterr().out)["export"]
        assert shown["line"] == estimated["line"] == line
        assert shown["model_type"] == estimated["model_type"] == PROMISES[name].model_type
    assert estimated["obstacles"] == [
        {"key": "model.residual.kind", "value": "post", "possible": "pre"}
    ]


def test_the_types_of_the_table_with_weights_have_a_mapping() -> None:
    assert {name for name, one in FAMILIES.items() if one.has_weights} == TABLES.keys()


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        (
            {
                # of four channels both orders are the same
                "head_dim": 8,
                "position": {"kind": "rope", "pairing": "neighbours"},
                "feed_forward": {"kind": "swiglu", "bias": True},
            },
            "llama",
        ),
        (
            {
                "position": {"kind": "rope", "pairing": "neighbours"},
                "attention": {"kind": "multi_head", "qk_norm": "head", "qkv_bias": False},
            },
            "qwen3",
        ),
        (
            {
                "position": {"kind": "rope", "pairing": "neighbours", "fraction": 0.5},
                "moe": {
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 8,
                    "score": "sigmoid",
                },
                "attention": {"kind": "multi_head", "qk_norm": "head", "qkv_bias": True},
            },
            "glm4_moe",
        ),
        (
            {
                "head_dim": 8,
                "moe": {
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 8,
                    "num_shared_experts": 2,
                    "first_dense_layers": 1,
                },
                "parametrization": {"kind": "mup", "base_hidden_size": 8},
            },
            "ernie4_5_moe",
        ),
    ],
    ids=["llama", "qwen3", "glm4_moe", "ernie4_5_moe"],
)
def test_channels_of_queries_and_keys_are_reordered_for_the_other_pairing(
    changes: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    model = build_tiny_config(**changes)
    run = build_run(model)
    write_random_run(run, tmp_path / "run", build_tiny_model(model))
    assert build_export_promise(run).model_type == model_type
    convert_to_hugging_face(tmp_path / "run", tmp_path / "exported")
    found = compare_exported_logits(tmp_path / "run", tmp_path / "exported")
    assert found.largest_logit > 1
    assert found.largest_difference <= 1e-5 * found.largest_logit
    assert {"q_proj", "k_proj"} <= set(ROTATED)


def test_rounded_weights_are_compared_with_rounded_weights(tmp_path: Path) -> None:
    model = build_tiny_moe_config()
    write_random_run(build_run(model), tmp_path / "run", build_tiny_model(model))
    convert_to_hugging_face(tmp_path / "run", tmp_path / "exported", dtype="bfloat16")
    found = compare_exported_logits(tmp_path / "run", tmp_path / "exported", "bfloat16")
    assert found.largest_difference <= 1e-5 * found.largest_logit


def test_an_export_that_computes_something_else_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_tiny_config()
    write_random_run(build_run(model), tmp_path / "run", build_tiny_model(model))
    write_random_run(build_run(model), tmp_path / "other", build_tiny_model(model, seed=7))
    convert_to_hugging_face(tmp_path / "other", tmp_path / "exported")
    found = compare_exported_logits(tmp_path / "run", tmp_path / "exported")
    assert not found.is_equal
    assert found.largest_difference > 0.3 * found.largest_logit
    assert "computes other logits than the run. Do not use it, and report this: " in caplog.text


def test_large_models_are_compared_when_asked_and_a_missing_library_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny_config()
    write_random_run(build_run(model), tmp_path / "run", build_tiny_model(model))
    convert_to_hugging_face(tmp_path / "run", tmp_path / "exported")
    monkeypatch.setattr("llmsys.convert.exported_logits.MAX_PARAMETERS", 1000)
    found = compare_exported_logits(tmp_path / "run", tmp_path / "exported")
    assert found.format().startswith("logits were not compared: ")
    assert "parameters are more than 1,000; --compare does it, in 0 GB of memory" in found.skipped
    asked = compare_exported_logits(tmp_path / "run", tmp_path / "exported", is_asked=True)
    assert asked.format().startswith(f"logits of transformers {transformers.__version__} differ ")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    asked = compare_exported_logits(tmp_path / "run", tmp_path / "exported", is_asked=True)
    assert "transformers is not installed (pip install transformers)" in asked.skipped


def test_comparing_is_an_option_of_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny_config()
    run = write_random_run(build_run(model), tmp_path / "run", build_tiny_model(model))
    assert main(["convert", str(run), str(tmp_path / "plain"), "--no-compare"]) == 0
    assert "logits" not in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "b"), "--compare"]) == 2
    assert "--compare and --no-compare are for what is written in" in capsys.readouterr().err
