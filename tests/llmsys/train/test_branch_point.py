"""A branch follows its parent bit for bit where nothing changed, and records what changed where
something did.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmsys.config.loading.load import load_run_config
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.errors import CheckpointError, ConfigError
from llmsys.events import read_latest_events
from llmsys.report.html_page import write_report
from llmsys.train.branch_point import find_branch_point
from llmsys.train.build_trainer import train_run
from llmsys.train.checkpoint_load import load_tensors, read_tensor_metadata
from llmsys.train.checkpoint_record import read_record, write_record
from llmsys.train.trainer import Trainer
from tests.helpers.dataset import VOCABULARY, make_dataset

STEP_TOKENS = 8 * 32
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the config, two datasets and the parents `moe` and `dense`, of six
    steps each.
    """
    folder = tmp_path_factory.mktemp("family")
    make_dataset(folder / "toy")
    make_dataset(folder / "other", documents=60)
    settings = {
        "run": {"folder": str(folder / "moe")},
        "data": {"folder": str(folder / "toy")},
        "tokenizer": {"kind": "file",
            "path": str(folder / "toy" / "tokenizer" / "tokenizer.model")},
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "moe": MOE,
        },
        "batch": {"sequence_length": 32, "sequences": 8, "micro_sequences": 4},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"kind": "wsd", "warmup_tokens": 512, "decay_tokens": 1},
        "train": {
            "tokens": 6 * STEP_TOKENS, "log_every_steps": 1, "reproducibility": "bitwise",
            "threads_per_process": 1,
            "precision": "fp32",
        },
        "checkpoint": {"every_steps": 2, "keep_last": 9},
    }  # fmt: skip
    (folder / "moe.yaml").write_text(yaml.safe_dump(settings))
    settings["model"] |= {"moe": None}
    settings["run"] = {"folder": str(folder / "dense")}
    settings["train"] |= {"reproducibility": "fast"}
    (folder / "dense.yaml").write_text(yaml.safe_dump(settings))
    for parent in ("moe", "dense"):
        train(folder, parent, parent)
    return folder


def train(folder: Path, config: str, name: str, *words: str) -> list[dict[str, Any]]:
    """Train a run of the family, and return its events."""
    run = load_run_config(str(folder / f"{config}.yaml"), [f"run.folder={folder / name}", *words])
    train_run(run, lambda *_: [])
    return read_latest_events(folder / name / "events.jsonl")


def select(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind without times and memory, which differ between runs."""
    own = ("second", "time", "memory", "utilisation")
    chosen = [event for event in events if event["event"] == kind]
    return [
        {key: value for key, value in one.items() if not any(word in key for word in own)}
        for one in chosen
    ]


def train_to_step_five(
    folder: Path, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train a branch of `moe` that ends in the middle of its fifth step."""

    def end_at_step_five(trainer: Trainer, *arguments: Any) -> bool:
        if trainer.steps_done == 4:
            raise KeyboardInterrupt
        return real(trainer, *arguments)

    real = Trainer._train_step
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", end_at_step_five)
        with pytest.raises(KeyboardInterrupt):
            train(folder, "moe", name, *words)


def test_a_branch_with_nothing_changed_follows_its_parent_bit_for_bit_also_when_it_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"train.branch_from={folder / 'moe'}@2", "train.on_bad_step=rewind"]
    train_to_step_five(folder, "same", words, monkeypatch)
    events = train(folder, "moe", "same", *words)
    parent = read_latest_events(folder / "moe" / "events.jsonl")
    assert [event["step"] for event in select(events, "step")] == [3, 4, 5, 6]
    for kind in ("step", "experts", "state_hash", "evaluation"):
        later = [event for event in select(parent, kind) if event["step"] > 2]
        assert [event for event in select(events, kind) if event["step"] > 2] == later, kind
    assert [event.get("resumed_from") for event in select(events, "start")] == [None, 4]
    [branch] = select(events, "branch")
    assert (branch["changes"], branch["moments"], branch["data_order"], branch["new"]) == (
        [],
        "taken",
        "continued",
        [],
    )
    record = json.loads(
        (folder / "same" / "checkpoints" / "step-00000006" / "state.json").read_text()
    )
    assert record["parent"]["checkpoint"] == str(folder / "moe" / "checkpoints" / "step-00000002")


@pytest.mark.parametrize("stages", [True, False], ids=["length stages", "consecutive windows"])
def test_a_run_with_an_order_of_its_own_that_is_killed_goes_on_with_the_same_bits(
    folder: Path, stages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # step 5, which is killed, is the second of the second stage
    begin, end = 3 * STEP_TOKENS, 5 * STEP_TOKENS
    words = [
        "batch.window_order=consecutive",
        "model.moe.routing={kind: capacity, scope: document}",
    ]
    if stages:
        words = [f"batch.length_stages=[{{until_tokens: {begin}, sequence_length: 8}}, "
                 f"{{until_tokens: {end}, sequence_length: 16}}]"]  # fmt: skip
    words.append(f"train.branch_from={folder / 'moe'}@2")
    whole, name = train(folder, "moe", f"whole-{stages}", *words), f"killed-{stages}"
    train_to_step_five(folder, name, words, monkeypatch)
    again = train(folder, "moe", name, *words)
    assert [event.get("resumed_from") for event in select(again, "start")] == [None, 4]
    for kind in ("step", "experts", "state_hash", "evaluation"):
        assert select(again, kind) == select(whole, kind), kind
    lengths = [event.get("sequence_length") for event in select(whole, "step")]
    assert lengths == ([8, 16, 16, 32] if stages else [None] * 4)
    [branch] = select(whole, "branch")
    # A stage divides the windows of the parent; consecutive windows are others.
    assert branch["data_order"].startswith("continued" if stages else "in another order")


@pytest.mark.parametrize(
    ("batch", "is_continued"),
    [({}, True), ({"packing": "best_fit"}, False), ({"sequence_length": 64}, False),
     ({"window_order": "consecutive"}, False), ({"fill_in_middle": {"rate": 0.5}}, False)],
    ids=str,
)  # fmt: skip
def test_data_continue_only_where_windows_are_cut_alike(
    folder: Path, batch: dict[str, Any], is_continued: bool
) -> None:
    checkpoint = folder / "dense" / "checkpoints" / "step-00000004"
    saved = json.loads((checkpoint / "state.json").read_text())["run"]
    words = [f"train.branch_from={folder / 'dense'}@4"]
    config = load_run_config(str(folder / "dense.yaml"), words)
    point = find_branch_point(config, saved | {"batch": saved["batch"] | batch})
    assert point.is_data_continued == is_continued


def test_a_branch_takes_judged_steps_of_its_parent_only_under_their_numbers(folder: Path) -> None:
    # The parent judged steps 1 to 4. The branch goes on with step 5, or with step 3 of twice the
    # tokens.
    for sequences, last_step, num_judged in ((8, 6, 4 + 2), (16, 3, 1)):
        name = f"judged-{sequences}"
        train(
            folder,
            "dense",
            name,
            f"train.branch_from={folder / 'dense'}@4",
            f"batch.sequences={sequences}",
        )
        record = json.loads(
            (folder / name / "checkpoints" / f"step-{last_step:08d}" / "state.json").read_text()
        )
        assert len(record["step_guard"]["accepted"]) == num_judged


def test_a_branch_counts_updates_and_not_the_steps_that_its_parent_skipped(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "dense", tmp_path / "skipped")
    checkpoint = tmp_path / "skipped" / "checkpoints" / "step-00000004"
    write_record(checkpoint, read_record(checkpoint) | {"updates": 3})
    train(folder, "dense", "updates", f"train.branch_from={tmp_path / 'skipped'}@4")
    state = json.loads(
        (folder / "updates" / "checkpoints" / "step-00000006" / "state.json").read_text()
    )
    assert (state["steps"], state["updates"]) == (6, 3 + 2)


def test_an_average_that_begins_with_a_branch_begins_at_the_weights_of_its_parent(
    folder: Path,
) -> None:
    # Of this half-life nothing is forgotten in two steps.
    words = [f"train.branch_from={folder / 'dense'}@4", f"train.ema_half_life_tokens={10**15}"]
    train(folder, "dense", "average", *words)
    stored = read_tensor_metadata(folder / "dense" / "checkpoints" / "step-00000004")
    names = [name for name in stored if name.startswith("parameter/")]
    theirs = {name: torch.empty(stored[name].shape) for name in names}
    load_tensors(theirs, folder / "dense" / "checkpoints" / "step-00000004")
    averages = {
        name.replace("parameter/", "average/"): torch.empty(stored[name].shape) for name in names
    }
    load_tensors(averages, folder / "average" / "checkpoints" / "step-00000006")
    for name in names:
        torch.testing.assert_close(averages[name.replace("parameter/", "average/")], theirs[name])


@pytest.mark.parametrize(
    ("stages", "is_continued"),
    [
        ({"0": [1, 0], "1024": [1, 1]}, True),
        ({"0": [1, 0], "512": [1, 1]}, False),
        ({"0": [0, 1]}, False),
    ],
    ids=str,
)
def test_data_continue_in_a_mixture_that_read_the_parents_alone(
    folder: Path, stages: dict[str, list[int]], is_continued: bool
) -> None:
    saved = json.loads(
        (folder / "dense" / "checkpoints" / "step-00000004" / "state.json").read_text()
    )["run"]
    config = load_run_config(
        str(folder / "dense.yaml"), [f"train.branch_from={folder / 'dense'}@4"]
    )
    other = saved["data"] | {"fingerprint": "other"}
    now = saved | {
        "mixture": stages,
        "data": {"0": saved["data"], "1": other},
        "data_fingerprint": "both",
    }
    assert find_branch_point(config, now).tokens == 1024
    assert find_branch_point(config, now).is_data_continued == is_continued
    swapped = now | {"data": {"0": other, "1": saved["data"]}}
    assert not find_branch_point(config, swapped).is_data_continued


def test_a_cool_down_is_the_end_of_a_run_that_had_it_from_the_start(folder: Path) -> None:
    """The rate is judged by its formula, and the weights by a run that knew of its end from the
    first step.
    """
    budget, decay, warmup = 6 * STEP_TOKENS, 2 * STEP_TOKENS + STEP_TOKENS // 2, 512
    words = [f"schedule.decay_tokens={decay}", "schedule.min_lr_factor=0.2"]
    branched = train(folder, "moe", "cooled", f"train.branch_from={folder / 'moe'}@2", *words)
    whole = train(folder, "moe", "known", *words)
    for kind in ("step", "experts", "state_hash"):
        later = [event for event in select(whole, kind) if event["step"] > 2]
        assert [event for event in select(branched, kind) if event["step"] > 2] == later, kind
    for event in select(whole, "step"):
        tokens = event["step"] * STEP_TOKENS
        share = min(1, (budget - tokens) / decay)
        expected = 0.01 * (tokens / warmup if tokens < warmup else 0.2 + 0.8 * share)
        assert event["learning_rate"] == pytest.approx(expected), event["step"]
    assert {event["learning_rate"] for event in select(whole, "step")} >= {0.01 * 0.2, 0.01}


def test_a_cool_down_on_a_mixture_with_longer_steps_names_what_changed(folder: Path) -> None:
    sources = f"[{{folder: {folder / 'toy'}}}, {{folder: {folder / 'other'}, weight: 0}}]"
    stages = f"[{{start_tokens: {4 * STEP_TOKENS}, weights: [1, 1]}}]"
    events = train(
        folder, "dense", "cool", f"train.branch_from={folder / 'dense'}@4", "batch.sequences=16",
        "data.kind=mixture",
        f"data.sources={sources}", f"data.stages={stages}", "schedule.decay_tokens=1024",
        "optimizer.weight_decay=0.2",
    )  # fmt: skip
    [branch] = select(events, "branch")
    assert (branch["step"], branch["parent_steps"], branch["tokens"]) == (2, 4, 4 * STEP_TOKENS)
    assert (branch["data_order"], branch["moments"]) == ("continued", "taken")
    keys = {change.split(" was ")[0] for change in branch["changes"]}
    assert {"batch.tokens", "schedule.decay_tokens", "optimizer.weight_decay"} <= keys
    assert "schedule.decay_tokens was 1, now 1024" in branch["changes"]
    [step] = select(events, "step")
    assert (step["step"], step["tokens"]) == (3, 6 * STEP_TOKENS)
    # Tokens of both sources from the token of the branch on, and the parent's share of the first.
    assert 0 < step["epochs"]["other"] < step["epochs"]["toy"]
    page = write_report(folder / "cool", None, folder / "page.html").read_text()
    assert all(
        text in page for text in ("Family", "schedule.decay_tokens was 1, now 1024", "dense")
    )
    other = train(
        folder, "dense", "elsewhere", f"train.branch_from={folder / 'dense'}@4",
        f"data.folder={folder / 'other'}",
        "optimizer.kind=muon", "batch.sequence_length=64", "batch.sequences=4",
        "model.position.scaling={kind: linear, factor: 2}", "train.ema_half_life_tokens=999",
    )  # fmt: skip
    [branch] = select(other, "branch")
    assert branch["data_order"] == "in another order, from the same token count"
    assert branch["moments"] == "new: optimizer.kind was adamw, now muon"
    assert "model.position.scaling.kind was none, now linear" in branch["changes"]


@pytest.mark.parametrize(
    ("words", "grown"),
    [
        (["model.hidden_size=64", "model.num_attention_heads=8", "model.num_key_value_heads=4"],
            "embed.weight"),
        (["model.intermediate_size=96"], "blocks.*.feed_forward.up_proj.weight"),
        (["model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 48}"],
         "blocks.*.feed_forward.experts.up_proj"),
    ],
    ids=["wider", "wider inside", "experts"],
)  # fmt: skip
def test_a_grown_model_computes_what_its_parent_did(
    folder: Path, words: list[str], grown: str
) -> None:
    name = grown.split(".")[-2] + str(len(words))
    where = f"train.branch_from={folder / 'dense'}@4", "train.grow_model=true"
    events = train(folder, "dense", name, *where, *words)
    parent = select(read_latest_events(folder / "dense" / "events.jsonl"), "step")[4]
    first = select(events, "step")[0]
    assert first["batch_digest"] == parent["batch_digest"]
    assert first["loss"] == pytest.approx(parent["loss"], rel=1e-5)
    [branch] = select(events, "branch")
    assert grown in branch["grown"]
    assert branch["moments"] == "new: the model has other tensors"


def test_more_layers_are_copies_of_the_stack(folder: Path) -> None:
    events = train(
        folder, "dense", "deeper", f"train.init_from={folder / 'dense'}@4", "train.grow_model=true",
        "model.num_hidden_layers=4", f"train.tokens={3 * STEP_TOKENS}",
    )  # fmt: skip
    assert select(events, "step")[0]["step"] == 1
    # of a model that has been trained; ln 384 is 5.95
    assert select(events, "step")[0]["loss"] < 5.5
    record = json.loads(
        (folder / "deeper" / "checkpoints" / "step-00000003" / "state.json").read_text()
    )
    assert (record["steps"], record["updates"]) == (3, 3), "the optimizer begins anew"
    [parent] = select(events, "branch")
    assert (parent["run"], parent["parent_steps"], parent["tokens"]) == (
        str(folder / "dense"),
        4,
        0,
    )
    assert (parent["data_order"], parent["moments"][:4]) == ("from token 0", "new:")
    assert "model.num_hidden_layers was 2, now 4" in parent["changes"]
    page = write_report(folder / "dense", None, folder / "parent.html").read_text()
    assert "model.num_hidden_layers was 2, now 4" in page  # a child in the family of its parent
    convert_to_hugging_face(folder / "deeper", folder / "deeper-model")
    origin = json.loads((folder / "deeper-model" / "llmsys.json").read_text())
    assert (origin["steps"], origin["checkpoint"][-13:]) == (3, "step-00000003")
    assert origin["parent"]["checkpoint"] == parent["checkpoint"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.branch_from={}@3"], r"dense has no checkpoint of step 3. Its last steps with "
        r"one: 2, 4, 6. Name one"),
        (["train.branch_from={}2@3"], "has no checkpoint of step 3. Its last steps with one: none"),
        (["train.branch_from={}@6"], "has 1536 tokens, and train.tokens=1536 leaves no step after "
        "it. Set train.tokens to the total of parent and branch, 1792 or more"),
        (["train.branch_from={}@2", "batch.sequences=3"], "has 512 tokens after 2 steps, and no "
        "step of the new run begins there: its steps have 96 tokens"),
        (["train.branch_from={}@2", "model.intermediate_size=96"], r"needs \(32, 96\).*or "
        r"train.grow_model=true"),
        (["train.branch_from={}@2", "model.intermediate_size=50", "train.grow_model=true"],
            "No rule grows it"),
        (["train.branch_from={}@2", "model.hidden_size=64", "train.grow_model=true"],
         "heads of 8 channels cannot grow to 16.*Set model.num_attention_heads=8"),
        (["train.branch_from={}@2", "model.num_key_value_heads=4", "train.grow_model=true"],
         "2 attention heads share keys and values, and 1 in the model to train. Set "
         "model.num_key_value_heads=2"),
        (["train.branch_from={}@2", "model.hidden_size=64", "model.num_attention_heads=8",
          "model.num_key_value_heads=4", "train.grow_model=true", "model.tie_word_embeddings=true"],
         "Set model.tie_word_embeddings=false"),
    ],
)  # fmt: skip
def test_a_branch_that_cannot_be_is_named_before_training(
    folder: Path, words: list[str], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        train(
            folder, "dense", "never", *(word.replace("{}", str(folder / "dense")) for word in words)
        )


def test_a_damaged_or_foreign_step_is_named(folder: Path, tmp_path: Path) -> None:
    for name in ("damaged", "foreign", "bare"):
        shutil.copytree(folder / "dense", tmp_path / name)
    file = tmp_path / "damaged" / "checkpoints" / "step-00000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for name, key, value in (
        ("foreign", "run", {"tokenizer_fingerprint": "abc"}),
        ("bare", "weights_only", True),
    ):
        checkpoint = tmp_path / name / "checkpoints" / "step-00000002"
        record = read_record(checkpoint)
        record[key] = record.get(key, {}) | value if isinstance(value, dict) else value
        write_record(checkpoint, record)
    for name, message in (
        ("damaged", "cannot be used: __0_0.distcp is damaged"),
        ("foreign", "was trained with tokenizer abc, but the data were prepared with"),
        ("bare", "has weights only"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(folder, "dense", "never", f"train.branch_from={tmp_path / name}@2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.branch_from=runs/a"],
            "runs/a does not name a step. Append the step of a checkpoint",
        ),
        (["train.branch_from=runs/a@1", "train.init_from=b"], "are both sources of weights"),
        (["train.grow_model=true"], "there is no model to grow"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    folder: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(str(folder / "dense.yaml"), words)
