"""The doctor itself: what its matrix holds, a part of it run for real, drills that pass, and
drills that must not.
"""

import json
import multiprocessing
import socket
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llmsys.config.attention import MultiHeadAttentionConfig
from llmsys.config.loading.load import load_model_config
from llmsys.config.moe import AuxiliaryLossConfig
from llmsys.doctor import drill_actions, parity_models, rank_pool
from llmsys.doctor.crash_drills import DRILLS, CrashDrill, replace_kill_count, run_drills
from llmsys.doctor.fault_injection import Fault
from llmsys.doctor.parity_check import format_parity_table, run_parity
from llmsys.doctor.parity_matrix import ENGINES, ParityCase, iter_parity_cases
from llmsys.doctor.parity_models import (
    CROWDED,
    DENSE,
    EXPERTS,
    IDLE,
    LATENT,
    PARITY_MODELS,
    SINKS,
    TRANSLATION,
    build_parity_model,
    require_memory,
)
from llmsys.doctor.rank_pool import TaskFailure, run_tasks
from llmsys.errors import ConfigError
from llmsys.launch.main import main
from llmsys.parallel.port import find_free_port
from tests.helpers.ranks import PRELOADED


def test_the_matrix_has_every_engine_axis_precision_policy_and_subject() -> None:
    cells = list(iter_parity_cases(4, ("fp32", "bf16")))
    assert {cell.engine for cell in cells} == set(ENGINES)
    assert {cell.recompute for cell in cells} == {"none", "selective", "full", "offload"}
    assert {cell.precision for cell in cells} == {"fp32", "bf16"}
    for axis in ("replicate", "expert", "tensor", "context", "context_kind", "pipeline"):
        assert any(axis in dict(cell.layout) for cell in cells), axis
    assert {cell.parity_model.name for cell in cells} == {subject.name for subject in PARITY_MODELS}
    assert len(cells) == len({cell.title for cell in cells})
    pipelines = [layout for cell in cells if "pipeline" in (layout := dict(cell.layout))]
    kinds = {
        (layout["pipeline"], layout.get("pipeline_schedule", {"kind": "1f1b"})["kind"])
        for layout in pipelines
    }
    assert kinds == {(ranks, kind) for ranks in (2, 4) for kind in ("1f1b", "gpipe", "interleaved")}


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a check that need not import torch; those of tests without this are spawned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(rank_pool, "multiprocessing", Mock(get_context=lambda _: context))


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_ranks")
def test_cells_with_adversarial_routing_agree_and_a_cell_that_dies_fails_alone() -> None:
    """Two ranks: all tokens on one expert, an idle one, a layout that cannot be built, one after
    it, and a ring.

    In bf16 some tokens choose another expert: balancing biases, shares of experts and gradients
    differ by that.
    """
    broken = ParityCase(
        2, "fsdp", (("tensor", 2),), "fp32", "none", DENSE, 3
    )  # three rows at a time do not divide eight
    cells = [
        ParityCase(2, "fsdp", (("expert", 2),), "fp32", "full", CROWDED, 2),
        broken,
        ParityCase(2, "fsdp", (("tensor", 2), ("expert", 2)), "fp32", "selective", IDLE, 2),
        ParityCase(
            2, "fsdp", (("context", 2), ("context_kind", "ring")), "fp32", "offload", EXPERTS, 2
        ),
        *(
            ParityCase(2, "ddp", (), "bf16", "none", model, 2)
            for model in (LATENT, SINKS, TRANSLATION)
        ),
    ]
    outcomes = run_parity(cells, lambda outcome: None)
    assert [outcome.has_passed for outcome in outcomes] == [True, False, *[True] * 5]
    assert "3 sequences do not divide" in outcomes[1].failure
    assert "FAIL" in format_parity_table(outcomes)


def _run_task(factor: torch.Tensor, number: int) -> int:
    import os
    import time

    if number == 1:
        time.sleep(60)
    if number == 3 and os.environ["RANK"] == "1":
        os._exit(9)
    return number * int(factor)


@pytest.mark.distributed
def test_a_task_that_hangs_or_dies_is_told_and_the_others_are_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first port is taken by the time that rank 0 binds it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(
            rank_pool, "find_free_port", lambda: ports.pop() if ports else find_free_port()
        )
        task = partial(_run_task, tensor := torch.tensor([10]))
        found = dict(run_tasks(task, range(5), ranks=2, timeout_seconds=8))
    assert not tensor.is_shared(), (
        "a shared tensor keeps a file open, and the parity check sends more than 1,024"
    )
    assert (
        "2 ranks did not start: rank 0 ended without an answer; starting them again" in caplog.text
    )
    assert [found[number] for number in (0, 2, 4)] == [0, 20, 40]
    assert isinstance(found[1], TaskFailure)
    assert "did not answer within 8 s" in found[1]
    assert isinstance(found[3], TaskFailure)
    assert "rank 1 ended without an answer" in found[3]


CHOSEN = (
    "killed between backward and step",
    "killed writing the record in the background",
    "a flipped bit",
    "a full disk",
    "random kills",
)


@pytest.mark.distributed
def test_killed_starved_and_damaged_runs_end_where_a_calm_one_ends() -> None:
    drills = replace_kill_count([drill for drill in DRILLS if drill.name in CHOSEN], 3)
    assert len(drills) == len(CHOSEN)
    outcomes = run_drills(drills, lambda outcome: None)
    assert all(outcome.passed for outcome in outcomes), [
        outcome.text for outcome in outcomes if not outcome.passed
    ]


@pytest.mark.distributed
def test_a_drill_fails_when_the_trajectory_is_another_one() -> None:
    """A run that goes on with another seed, and an accident that never happens."""

    def train_with_another_seed(config: Any) -> str:
        other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
        drill_actions.run_until_finished(other, 1)
        return "done"

    never = drill_actions.build_fault_drill(Fault("removing an older one", 999), 1, 1)
    cheated, calm = run_drills(
        [CrashDrill("cheat", "", train_with_another_seed), CrashDrill("never", "", never)],
        lambda outcome: None,
    )
    assert not cheated.passed
    assert "an undisturbed run in" in cheated.text
    assert not calm.passed
    assert "no fault was injected" in calm.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parity", "--engine", "fsdq"], "--engine fsdq is unknown. Use fsdp, ddp,"),
        (["parity", "--precision", "fp8"], "--precision fp8 is unknown. Use fp32, bf16 or fp16."),
        (
            ["crash", "train/demo"],
            "doctor crash trains its own toy run, not train/demo. Leave it out.",
        ),
        (
            ["parity", "model/deepseek-v3", "--processes", "2"],
            "Parity of 671,026,404,352 parameters on 2 processes",
        ),
        (
            ["parity", "model/bert-base", "model.head={kind: features}", "--processes", "1"],
            "model.head.kind=features of model/bert-base has no loss",
        ),
        (
            ["crash", "--optimizer", "sgd"],
            "--optimizer sgd is unknown. Use adamw, lion, ademamix, schedule_free,",
        ),
        (
            ["crash", "--optimizer", "all", "--drills", "random kills"],
            "--optimizer has drills of its own. Leave",
        ),
        (
            ["crash", "--drills", "nothing"],
            "--drills nothing is unknown. Use killed before the backward pass,",
        ),
    ],
)
def test_what_the_doctor_does_not_know_is_named(
    words: list[str], message: str, capsys: Any
) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_subjects_have_what_goes_wrong() -> None:
    models = [subject.model for subject in PARITY_MODELS]
    experts = [model.moe for model in models if model.moe is not None]
    weights = [
        moe.balance.weight for moe in experts if isinstance(moe.balance, AuxiliaryLossConfig)
    ]
    assert len(weights) >= 2
    assert min(weights) > 0
    assert any(model.attention.kind == "latent" for model in models)
    assert any(model.multi_token_prediction is not None for model in models)
    assert any(
        isinstance(model.attention, MultiHeadAttentionConfig) and model.attention.sinks
        for model in models
    )
    assert {moe.score for moe in experts} >= {"softmax", "sigmoid"}
    assert {moe.routing.kind for moe in experts} >= {"token_choice", "capacity"}
    assert {subject.objective.kind for subject in PARITY_MODELS} == {
        "next_token",
        "masked",
        "translation",
        "classification",
    }


MINE = """
model: {vocab_size: 50, hidden_size: 24, intermediate_size: 32, num_hidden_layers: 3,
  num_attention_heads: 2, num_key_value_heads: 1,
  max_position_embeddings: 10, dropout: {residual: 0.5},
  moe: {num_experts: 3, num_experts_per_tok: 2, moe_intermediate_size: 8,
    balance: {kind: auxiliary_loss, weight: 0.5}}}
batch: {sequence_length: 10}
"""


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_ranks")
def test_parity_takes_the_model_of_a_config(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    words = [
        str(tmp_path / "mine.yaml"),
        "model.num_hidden_layers=1",
        "--engine",
        "fsdp",
        "--precision",
        "fp32",
    ]
    assert main(["doctor", "parity", *words, "--processes", "2", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["cell"].split(", ", 3)[3] for cell in cells} == {str(tmp_path / "mine.yaml")}
    assert any("tensor=2" in cell["cell"] for cell in cells)
    # two ranks cannot share three experts
    assert not any("expert=2" in cell["cell"] for cell in cells)


def test_a_model_keeps_all_but_its_dropout(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    model = load_model_config(str(tmp_path / "mine.yaml"))
    found = build_parity_model(model, "mine").model
    assert found.dropout.residual == 0.0
    assert found == model.model_copy(update={"dropout": found.dropout})


def test_what_the_machine_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_models, "get_free_memory", lambda: 1_000_000)
    with pytest.raises(
        ConfigError,
        match=r"on 4 processes takes about 0\.0 GB, and 0\.0 GB are free\. Use fewer --proc",
    ):
        require_memory(DENSE.model, 4)


@pytest.mark.usefixtures("forked_ranks")
def test_the_verb_tells_in_json_what_passed(capsys: Any) -> None:
    assert (
        main(
            [
                "doctor",
                "parity",
                "--processes",
                "1",
                "--engine",
                "ddp",
                "--precision",
                "fp32",
                "--json",
            ]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"]
    assert all(cell["distance"]["gradient"] < 1e-4 for cell in answer["cells"])
