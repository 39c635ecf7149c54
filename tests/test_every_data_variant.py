"""Every variant of the unions of `data`, `tokenizer` and `evaluation` prepares a tiny dataset and
is reported.

The counterpart of tests/test_every_variant.py for what happens before a model: a variant that the
pipeline does not know fails here under its name.
"""

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.harness import HarnessConfig
from llmsys.config.mixture import MixtureConfig
from llmsys.config.run import RunConfig
from llmsys.convert.token_formats import convert_tokens
from llmsys.data.multiple_choice import read_questions
from llmsys.data_pipeline.graph.quarantine import read_quarantine
from llmsys.data_pipeline.graph.stage_runner import build_executor
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.rules.classifier import train_linear_model
from llmsys.data_pipeline.rules.hashed_features import FeatureConfig
from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer
from llmsys.errors import ConfigError, LlmsysError
from llmsys.report.html_page import write_report
from llmsys.train.harness_evaluator import load_harness_tasks
from tests.helpers.chats import build_chats, write_chats
from tests.helpers.config_variants import ConfigVariant, build_settings, list_variants
from tests.helpers.tiny_crawl import make_crawl, write_sentences
from tests.helpers.tiny_encoder import save_tiny_encoder
from tests.helpers.tiny_images import write_images

DATA = [variant for variant in list_variants() if variant.path.split(".")[0] == "data"]
TOKENIZERS = [variant for variant in list_variants() if variant.path == "tokenizer"]
TASKS = [variant for variant in list_variants() if variant.path == "evaluation.tasks[]"]
# Optional packages that may be missing: the error names the package.
OPTIONAL = {
    "data.extract.kind=trafilatura": "trafilatura",
    "data.rules[].kind=fasttext_classifier": "fasttext",
}
# tests/data_pipeline/executors/test_ray_and_slurm.py starts these clusters.
CLUSTERS = {"data.executor.kind=ray", "data.executor.kind=slurm"}
VOCABULARY = 400
ARPA = "\\data\\\nngram 1=3\n\n\\1-grams:\n-1\t<unk>\n-1\t</s>\n-0.5\triver\n\n\\end\\\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that EXAMPLES name, and a prepared dataset with its tokenizer."""
    made = tmp_path_factory.mktemp("inputs")
    make_crawl(made / "crawl", files=1, pages=6)
    choose = random.Random(1)
    for language in ("en", "de"):
        (made / f"text.{language}").write_text(
            "".join(f"{line}\n" for line in write_sentences(choose, 40))
        )
    (made / "labels.tsv").write_text(
        "".join(f"{'abc'[i % 3]}\t{line}\n" for i, line in enumerate(write_sentences(choose, 40)))
    )
    write_images(made / "images.npz")
    (made / "items.jsonl").write_text(
        json.dumps({"q": " ".join(write_sentences(choose, 4))}) + "\n"
    )
    (made / "vectors.jsonl").write_text(
        "".join(f'{{"text": "{line}", "vector": [1, {len(line)}]}}\n'
                for line in write_sentences(choose, 40))
    )  # fmt: skip
    (made / "pairs.jsonl").write_text('{"good": "she runs", "bad": "she run"}\n')
    (made / "choices.jsonl").write_text('{"question": "a", "choices": ["b", "c"], "answer": 1}\n')
    write_chats(made / "chats.jsonl", build_chats(20))
    (made / "chat.jinja").write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    (made / "model.arpa").write_text(ARPA)
    (made / "model.bin").write_bytes(b"")
    train_linear_model(
        ["river stone", "old bridge"] * 4, ["good", "bad"] * 4, FeatureConfig(bits=8)
    ).save(made / "model.npz")
    save_tiny_encoder(made / "judge")
    prepare_dataset(build_data_config(made, {"data": {"kind": "crawl"}}, made / "prepared"))
    convert_tokens(made / "prepared", made / "megatron", "megatron")
    return made


def build_data_config(folder: Path, settings: dict[str, Any], output: Path) -> RunConfig:
    """Return a run that prepares the data of `settings` into `output`, in this process."""
    data = {"kind": "crawl"} | settings.get("data", {})
    if data["kind"] != "mixture":
        data = {"folder": output, "executor": {"kind": "inline"}} | data
    if data["kind"] == "crawl":
        data = {
            "inputs": [str(folder / "crawl/*.warc.gz")],
            "split": {"heldout_fraction": 0.3},
        } | data
    if data["kind"] == "images":  # no text, so no tokenizer
        return RunConfig.model_validate(settings | {"data": data})
    tokenizer = {"kind": "sentencepiece"} | settings.get("tokenizer", {})
    changes: dict[str, Any] = {"data": data, "tokenizer": tokenizer}
    if tokenizer["kind"] == "sentencepiece":
        tokenizer["vocab_size"] = VOCABULARY
    if "model" in settings:
        changes["model"] = settings["model"] | {"vocab_size": VOCABULARY}
    return RunConfig.model_validate(settings | changes)


@pytest.mark.parametrize("variant", DATA, ids=str)
def test_prepare_and_report(
    variant: ConfigVariant, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = build_data_config(folder, build_settings(variant), tmp_path / "data")
    if isinstance(config.data, MixtureConfig):
        with pytest.raises(ConfigError, match="refers to prepared datasets"):
            prepare_dataset(config)
        return
    if str(variant) in CLUSTERS:  # as on a machine without them, so that nothing is started
        monkeypatch.setitem(sys.modules, "ray", None)
        # it has imported ray
        monkeypatch.delitem(sys.modules, "llmsys.data_pipeline.executors.ray", raising=False)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(LlmsysError, match=rf"{variant} needs"):
            build_executor(config.data.executor, tmp_path, 0)
        return
    package = OPTIONAL.get(str(variant))
    if package == "fasttext" or (package and importlib.util.find_spec(package) is None):
        # missing, or the empty model is rejected
        with pytest.raises(LlmsysError, match=f"(?i){package}"):
            prepare_dataset(config, "documents")
        return
    prepare_dataset(config, "documents" if config.data.kind == "crawl" else "tokens")
    assert read_quarantine(config.data.folder) == []
    page = write_report(None, config.data.folder, tmp_path / "report.html").read_text()
    assert "Documents after each stage" in page


@pytest.mark.parametrize("variant", TOKENIZERS, ids=str)
def test_tokenizer(
    variant: ConfigVariant, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    prepare_dataset(build_data_config(folder, build_settings(variant), tmp_path / "data"))
    if variant.kind == "none":  # images have no text
        assert not (tmp_path / "data" / "tokenizer").exists()
        return
    tokenizer = load_dataset_tokenizer(tmp_path / "data" / "tokenizer")
    assert tokenizer.decode(tokenizer.encode("old bridges near water")) == "old bridges near water"
    assert (
        "pieces occur in no document"
        in write_report(None, tmp_path / "data", tmp_path / "report.html").read_text()
    )


@pytest.mark.parametrize("variant", TASKS, ids=str)
def test_evaluation_task(
    variant: ConfigVariant, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (task,) = RunConfig.model_validate(build_settings(variant)).evaluation.tasks
    if isinstance(task, HarnessConfig):  # tests/llmsys/train/test_harness_evaluator.py
        with pytest.raises(LlmsysError, match=r"lm_eval|the harness knows no task toy"):
            load_harness_tasks(task)
        return
    (question,) = read_questions(task)
    assert len(question.choices) == 2


def test_every_data_variant_is_walked() -> None:
    # Schedules of a pipeline need several processes: tests/llmsys/engine/test_pipeline.py. Ramps
    # need many steps: tests/llmsys/train/test_batch_growth.py and test_mixture_run.py.
    elsewhere = {one for one in list_variants() if one.path.startswith(("layout.", "batch.ramp"))}
    walked = {*DATA, *TOKENIZERS, *TASKS, *elsewhere}
    assert [
        str(variant)
        for variant in list_variants()
        if not variant.is_trained and variant not in walked
    ] == []
