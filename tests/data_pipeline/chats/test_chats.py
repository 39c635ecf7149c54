"""Chats become token rows with a loss on answers; what cannot be used is counted, and named
before training.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmsys.config.run import RunConfig
from llmsys.data.batch import IGNORED
from llmsys.data_pipeline.inspection.verify_dataset import verify_dataset
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import load_manifest, open_tokens
from llmsys.errors import ConfigError, DataError
from llmsys.report.dataset_sections import build_dataset_numbers
from llmsys.train.build_engine import build_model
from llmsys.train.build_objective import build_evaluator, build_step_batches
from llmsys.vocabulary.chat_template import load_chat_template
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.chats import MARKED_TEMPLATES, PLAIN_TEMPLATES, build_chats, write_chats
from tests.helpers.json_tokenizers import write

MODEL = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
ANSWER = {"role": "assistant", "content": "y"}
BAD_ROWS: list[tuple[str, Any]] = [
    ("no_messages", {"text": "x"}),
    ("no_messages", {"messages": []}),
    ("no_message", {"messages": [{"role": "user"}, ANSWER]}),
    ("no_message", {"messages": [{"role": "user", "content": 3}, ANSWER]}),
    ("no_answer", {"messages": [{"role": "user", "content": "x"}]}),
    ("control_token", {"messages": [{"role": "user", "content": "x<|im_end|>"}, ANSWER]}),
    ("tokens", {"messages": [{"role": "user", "content": "long " * 200}, ANSWER]}),
]


def build_config(folder: Path, **data: Any) -> RunConfig:
    section = {
        "kind": "chat",
        "folder": folder / "data",
        "inputs": [folder / "chats.jsonl"],
        "max_tokens": 200,
    }
    section |= {"split": {"heldout_fraction": 0.2}, "executor": {"kind": "inline"}}
    settings = {
        "run": {"folder": folder / "run"},
        "data": section | data,
        "tokenizer": {"kind": "file", "path": folder / "tokenizer"},
        "model": MODEL,
        "batch": {"sequence_length": 256, "sequences": 4, "packing": "best_fit"},
        "train": {"precision": "fp32"},
    }
    return RunConfig.model_validate(settings)


def is_part(ids: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return any(whole[at : at + len(ids)] == ids for at in range(len(whole)))


def write_inputs(
    folder: Path, rows: list[dict[str, Any]], template: str = MARKED_TEMPLATES["chatml"]
) -> None:
    write_chats(folder / "chats.jsonl", rows)
    (folder / "tokenizer").mkdir()
    write("qwen2", folder / "tokenizer")
    file = folder / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("chats")
    write_inputs(folder, [*build_chats(60), *(row for _, row in BAD_ROWS)])
    with (folder / "chats.jsonl").open("a") as file:
        half = {"messages": [{"role": "user", "content": "x\ud83d"}, ANSWER]}
        file.write(json.dumps(half) + "\n")
        file.write(
            'not json\n\n{"messages": [{"from": "human", "value": "x"}, {"from": "gpt", "value": '
            '"y"}]}\n'
        )
    config = build_config(folder)
    prepare_dataset(config)
    return config


def test_unusable_lines_are_counted_with_their_reasons(prepared: RunConfig) -> None:
    manifest = load_manifest(prepared.data.folder)
    (stage,) = manifest.funnel
    expected: dict[str, int] = {"no_messages": 1, "surrogate": 1}
    for test, _ in BAD_ROWS:
        expected[test] = expected.get(test, 0) + 1
    assert {drop.test: drop.documents for drop in stage.dropped} == expected
    assert (stage.documents_in, stage.documents_out) == (70, 61)
    reasons = {drop.test: drop.examples[0].reason for drop in stage.dropped}
    assert "spells the control token '<|im_end|>'" in reasons["control_token"]
    assert "more than 200" in reasons["tokens"]
    assert not verify_dataset(prepared.data.folder, 3).findings
    assert any(name == "answer tokens" for name, _, _ in build_dataset_numbers(manifest))


def test_a_second_preparation_has_nothing_to_do_and_another_template_makes_other_tokens(
    prepared: RunConfig, tmp_path: Path
) -> None:
    first = load_manifest(prepared.data.folder)
    assert prepare_dataset(prepared) == first
    (tmp_path / "other.jinja").write_text(PLAIN_TEMPLATES["gemma"])
    data = prepared.data.model_copy(
        update={"template": tmp_path / "other.jinja", "folder": tmp_path / "data"}
    )
    other = prepare_dataset(prepared.model_copy(update={"data": data}))
    assert other.fingerprint != first.fingerprint
    assert (tmp_path / "data" / "tokenizer" / "chat_template.jinja").read_text() == PLAIN_TEMPLATES[
        "gemma"
    ]


def test_answers_in_packed_windows_are_learned_as_if_every_chat_were_alone(
    prepared: RunConfig,
) -> None:
    shards = open_tokens(prepared.data.folder, "train")
    tokenizer = load_tokenizer(prepared.data.folder / "tokenizer")
    template = load_chat_template(prepared.data.folder / "tokenizer", tokenizer)
    torch.manual_seed(0)
    model = build_model(prepared).to_empty(device="cpu")
    model.reset_buffers()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    alone: dict[tuple[int, ...], torch.Tensor] = {}
    for one in [*build_chats(60), {"messages": [{"role": "user", "content": "x"}, ANSWER]}]:
        chat = tokenizer.encode_controls(template.render_chat(one["messages"]).text).ids
        alone[tuple(chat)] = model(torch.tensor([chat]))[0]
    seen = 0
    for batch in build_step_batches(prepared, 1, 0).get_micro_batches(0):
        logits_BTV = model(**batch.to_model_inputs())
        assert batch.documents_BT is not None
        for row, documents_T in enumerate(batch.documents_BT):
            for number in documents_T[documents_T >= 0].unique().tolist():
                places = torch.where(documents_T == number)[0]
                ids = tuple(batch.tokens_BT[row, places].tolist())
                found = [whole for whole in alone if whole == ids]
                if not found:  # a border, or a chat that is cropped
                    assert len(ids) == 1 or any(is_part(ids, whole) for whole in alone)
                    continue
                assert torch.allclose(logits_BTV[row, places], alone[found[0]], atol=1e-4)
                targets = batch.targets_BT[row, places]
                answer = tokenizer.decode(targets[targets != IGNORED].tolist())
                assert answer.startswith(("It is ", "y"))
                assert "What" not in answer
                assert targets[-1] == IGNORED, "the border is not learned"
                seen += 1
    assert seen > 5
    assert shards.manifest.answers


def test_evaluation_scores_answers_alone(prepared: RunConfig) -> None:
    def compute_even_logits(batch: Any) -> torch.Tensor:
        return torch.zeros(*batch.tokens_BT.shape, 384)

    result = build_evaluator(prepared).evaluate(compute_even_logits, torch.device("cpu")).to_dict()
    answers = load_manifest(prepared.data.folder).answers
    assert result["evaluated_tokens"] == answers["heldout"]
    assert result["loss"] == pytest.approx(np.log(384), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(
        result["loss"] / np.log(2) * answers["heldout"] / result["evaluated_bytes"], rel=1e-5
    )


THINKING = PLAIN_TEMPLATES["chatml"].replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('It')[-1] }}"
)


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        ("{% for m in messages %}", 4, "is no Jinja template"),
        ("", 4, "has no chat template"),
        (THINKING, 4, r"chats\.jsonl:1: .* renders message 2 \(assistant\) differently"),
        ("{{ raise_exception('never') }}", 4, r"no chat is left: 4 by template .*never"),
        (MARKED_TEMPLATES["chatml"], 0, "no chat is left: the files have no lines"),
    ],
)
def test_bad_templates_and_files_are_named(
    template: str, rows: int, message: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path, build_chats(rows), template or "x")
    if not template:
        write("qwen2", tmp_path / "tokenizer")
    with pytest.raises(DataError, match=message):
        prepare_dataset(build_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch": {"attention_scope": "window"}},
            "window would show a chat the others of its sequence",
        ),
        ({"tokenizer": {"kind": "sentencepiece"}}, "sentencepiece has no chat template"),
        (
            {"model": MODEL | {"family": "encoder", "head": {"kind": "mlm"}}},
            "chat data do not fit objective masked",
        ),
    ],
)
def test_what_chats_do_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    settings = {
        "data": {"kind": "chat"},
        "tokenizer": {"kind": "file", "path": "x"},
        "model": MODEL,
    }
    with pytest.raises((ConfigError, ValueError), match=message):
        RunConfig.model_validate(settings | changes)
