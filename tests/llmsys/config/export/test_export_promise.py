"""The export that is promised before a run: its type, or what stands against it and would do."""

import json
from pathlib import Path

import pytest

from llmsys.config.export.exported_model import (
    ExportPromise,
    NoExportError,
    build_export_promise,
    choose_export,
    choose_run_export,
)
from llmsys.config.export.kept_folder import HUGGING_FACE, IMPORT_RECORD_NAME
from llmsys.config.loading.load import build_model_config, load_run_config
from llmsys.config.parametrization_factors import compute_head_factor, compute_score_factor
from llmsys.launch.main import main
from tests.helpers.paths import CONFIGS as FOLDER
from tests.helpers.tiny_model import build_tiny_config

CONFIGS = sorted(
    f"{folder}/{file.stem}"
    for folder in ("train", "recipes")
    for file in (FOLDER / folder).glob("*.yaml")
)
PROMISES: dict[str, ExportPromise] = {
    name: build_export_promise(load_run_config(name)) for name in CONFIGS
}
EXPORTED = [name for name, promise in PROMISES.items() if promise.model_type is not None]


@pytest.mark.parametrize("name", EXPORTED)
def test_must_export_takes_what_is_exported(name: str) -> None:
    assert load_run_config(name, ["train.must_export=true"]).train.must_export


def test_must_export_names_the_keys_and_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "train/gpt1-tiny", "train.must_export=true"]) == 2
    assert (
        "command line: train.must_export: true, and the model does not export to Hugging Face; "
        "for gpt2, the nearest type: model.residual.kind=post (pre would do). Set these "
        "fields so, or train.must_export=false."
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train/gpt1-tiny", "model.residual.kind=pre"),
        ("train/bert-small", "model.residual.kind=post"),
        ("train/short-tiny", "model.position={kind: learned, offset: 2}"),
    ],
)
def test_the_value_that_would_do_does(name: str, change: str) -> None:
    assert PROMISES[name].line.count(" would do") == 1
    assert change.partition("=")[0] in PROMISES[name].line
    run = load_run_config(name, [change, "train.must_export=true"])
    assert build_export_promise(run).model_type is not None


def test_the_nearest_type_is_of_the_same_family() -> None:
    assert PROMISES["recipes/encoder"].nearest == "roformer"
    assert PROMISES["recipes/translation"].nearest == "marian"
    assert PROMISES["train/t5-tiny"].nearest == "t5"


def test_a_type_whose_weights_are_not_converted_is_not_promised() -> None:
    sizes = {"vocab_size": 97, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 24}
    model = build_model_config({"model_type": "xlnet"} | sizes)
    assert choose_export(model, None, "xlnet").model_type == "xlnet"
    with pytest.raises(NoExportError, match=r"model\.head\.kind=permutation"):
        choose_export(model)


def test_a_bare_model_has_the_promise_of_its_run() -> None:
    with pytest.raises(NoExportError, match=r"nearest is .*model\.position\.kind=transformer_xl"):
        choose_run_export(load_run_config("train/gopher-tiny"))


def test_a_pairing_that_no_type_has_is_exported_in_the_other_order() -> None:
    rope = {"kind": "rope", "pairing": "neighbours"}
    model = build_tiny_config(position=rope, feed_forward={"kind": "swiglu", "bias": True})
    choice = choose_export(model)
    assert choice.model_type == "llama"
    assert choice.model.position.pairing == "halves"


def test_a_run_that_continues_a_folder_keeps_its_type_while_the_model_is_the_same(
    tmp_path: Path,
) -> None:
    run = load_run_config("train/gpt1-tiny", [f"run.folder={tmp_path}"])
    kept = tmp_path / HUGGING_FACE
    kept.mkdir()
    (kept / "config.json").write_text('{"model_type": "of_another"}')
    (kept / IMPORT_RECORD_NAME).write_text(json.dumps({"model": {"vocab_size": 1}}))
    assert build_export_promise(run).model_type is None
    (kept / IMPORT_RECORD_NAME).write_text(json.dumps({"model": run.model.model_dump(mode="json")}))
    assert build_export_promise(run).model_type == "of_another"
    (kept / "config.json").write_text("{")
    assert build_export_promise(run).model_type is None


def test_multipliers_follow_the_widths() -> None:
    mup = {"kind": "mup", "base_hidden_size": 8, "base_head_dim": 2}
    model = build_tiny_config(parametrization=mup)
    assert compute_head_factor(model) == 0.5
    assert compute_score_factor(model, 4) == pytest.approx(0.5**0.5)
    assert compute_score_factor(model, 4, has_own_scale=True) == 0.5
