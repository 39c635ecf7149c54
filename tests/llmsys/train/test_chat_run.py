"""A run that is tuned on chats: killed and resumed, mixed with documents, answering in its
template, and exported.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import llmsys.launch.train
from llmsys.config.loading.load import load_run_config
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import load_manifest
from llmsys.errors import ConfigError, DataError
from llmsys.events import read_events
from llmsys.generate.chat_format import load_chat_format
from llmsys.generate.chat_model import read_messages
from llmsys.generate.prompt_completion import complete_prompts
from llmsys.train.build_objective import build_step_batches
from llmsys.train.checkpoint_load import load_tensors, read_tensor_metadata
from llmsys.train.run_data import load_run_tokenizer
from llmsys.train.trained_model import load_trained_model
from llmsys.vocabulary.chat_template import TEMPLATE_NAME
from tests.helpers.chats import MARKED_TEMPLATES, build_chats, write_chats
from tests.helpers.json_tokenizers import write


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of chats, prepared and trained for six steps of which the third is kept."""
    folder = tmp_path_factory.mktemp("chat-run")
    write_chats(folder / "chats.jsonl", build_chats(40))
    (folder / "chatml.jinja").write_text(MARKED_TEMPLATES["chatml"])
    (folder / "tokenizer").mkdir()
    write("qwen2", folder / "tokenizer")
    settings = {
        "run": {"name": "chats", "folder": str(folder / "calm")},
        "data": {
            "kind": "chat", "folder": str(folder / "data"), "inputs": [str(folder / "chats.jsonl")],
            "template": str(folder / "chatml.jinja"), "split": {"heldout_fraction": 0.2},
            "executor": {"kind": "inline"},
        },
        "tokenizer": {"kind": "file", "path": str(folder / "tokenizer")},
        "model": {
            "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 128,
        },
        "batch": {"sequence_length": 128, "sequences": 2, "packing": "best_fit"},
        "train": {"tokens": 6 * 256, "precision": "fp32", "threads_per_process": 1,
            "log_every_steps": 1},
        "checkpoint": {"every_steps": 3, "keep_last": 3},
        "generation": {"prompts": ["What is 2 plus 3?"], "max_new_tokens": 4},
    }  # fmt: skip
    path = folder / "chats.yaml"
    path.write_text(yaml.safe_dump(settings))
    prepare_dataset(load_run_config(str(path)))
    assert llmsys.launch.train.main([str(path)]) == 0
    return path


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.empty(one.shape, dtype=one.dtype)
        for name, one in read_tensor_metadata(checkpoint).items()
    }
    load_tensors(tensors, checkpoint)
    return tensors


def test_a_resumed_run_is_the_uninterrupted_one(config: Path, tmp_path: Path) -> None:
    calm = config.parent / "calm"
    shutil.copytree(
        calm / "checkpoints" / "step-00000003", tmp_path / "checkpoints" / "step-00000003"
    )
    assert llmsys.launch.train.main([str(config), f"run.folder={tmp_path}"]) == 0
    found, expected = (
        read_weights(one / "checkpoints" / "step-00000006") for one in (tmp_path, calm)
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    steps = {
        event["step"]: event
        for event in read_events(calm / "events.jsonl")
        if event["event"] == "step"
    }
    again = {
        event["step"]: event
        for event in read_events(tmp_path / "events.jsonl")
        if event["event"] == "step"
    }
    assert again.keys() == {4, 5, 6}
    assert all(again[step]["batch_digest"] == steps[step]["batch_digest"] for step in again)


def test_prompts_are_messages_in_the_template_and_the_export_has_it(
    config: Path, tmp_path: Path
) -> None:
    run = load_run_config(str(config))
    chats = load_chat_format(run)
    assert chats is not None
    text = "<|im_start|>user\nWhat is 2 plus 3?<|im_end|>\n<|im_start|>assistant\n"
    ids = chats.tokenizer.encode_controls(text).ids
    assert chats.encode_question("What is 2 plus 3?") == ids
    assert chats.stop_ids == (chats.tokenizer.find_piece_id("<|im_end|>"),)
    model, _ = load_trained_model(run)
    seen: list[list[int]] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
    [sample] = complete_prompts(model, load_run_tokenizer(run), run)
    hook.remove()
    assert sample["prompt"] == "What is 2 plus 3?"
    assert seen[0] == ids
    with pytest.raises(DataError, match=r"spells the control token <\|im_end\|>"):
        chats.encode_question("x<|im_end|>")
    plain = run.model_copy(
        update={"generation": run.generation.model_copy(update={"format": "text"})}
    )
    assert load_chat_format(plain) is None
    convert_to_hugging_face(config.parent / "calm", tmp_path / "hub")
    assert (tmp_path / "hub" / TEMPLATE_NAME).read_text() == MARKED_TEMPLATES["chatml"]


def test_requests_of_the_page_are_messages() -> None:
    assert read_messages({"text": "x"}) == [{"role": "user", "content": "x"}]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert read_messages({"messages": chat}) == chat
    for wrong in ([], "x", [{"role": "user"}]):
        with pytest.raises(ConfigError, match="messages is no list"):
            read_messages({"messages": wrong})


def test_chats_and_documents_are_mixed(config: Path, tmp_path: Path) -> None:
    texts = "".join(
        json.dumps({"text": f"Old bridge {number} over the river. " * 9}) + "\n"
        for number in range(60)
    )
    (tmp_path / "texts.jsonl").write_text(texts)
    words = [f"data={{kind: crawl, folder: {tmp_path / 'texts'}, inputs: "
    f"[{tmp_path / 'texts.jsonl'}]}}",
             "data.executor.kind=inline", "data.split.heldout_fraction=0.2",
             "data.language.languages=[]"]  # fmt: skip
    prepare_dataset(load_run_config(str(config), words))
    sources: list[dict[str, Any]] = [{"folder": str(config.parent / "data"), "weight": 1},
                                     {"folder": str(tmp_path / "texts"), "weight": 1}]  # fmt: skip
    mixed = load_run_config(
        str(config), [f"data={{kind: mixture, sources: {json.dumps(sources)}}}"]
    )
    batches = [
        one for step in range(4) for one in build_step_batches(mixed, 1, 0).get_micro_batches(step)
    ]
    vocabulary = load_manifest(config.parent / "data").vocab_size
    assert vocabulary is not None
    assert all(int(one.tokens_BT.max()) < vocabulary for one in batches)
    shares = [float((row >= 0).float().mean()) for one in batches for row in one.targets_BT]
    # A row of documents has a loss on every token that is not padding, one of chats on answers.
    assert max(shares) > 0.95
    assert 0 < min(shares) < 0.6
    words = [
        f"data={{kind: mixture, sources: {json.dumps(sources)}}}",
        "batch.attention_scope=window",
    ]
    with pytest.raises(ConfigError, match=r"would show the chats of data each other"):
        build_step_batches(
            load_run_config(str(config), [*words, "batch.packing=concatenate"]), 1, 0
        )
