"""A pipeline against one process: every gradient, the norm, the balance of experts, checkpoints, and skipped steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmsys.config.run import RunConfig
from llmsys.doctor.parity_check import compare_to_reference, gather_full_tensor
from llmsys.doctor.parity_matrix import INTERLEAVED, ParityCase
from llmsys.doctor.parity_models import DEEP, EXPERTS, LATENT, SEQUENCES, ParityModel
from llmsys.doctor.parity_reference import RATE, Trajectory, build_micro_batches, compute_reference_trajectory
from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import all_gather_object, get_rank, get_world_size
from llmsys.train import checkpoint_load
from llmsys.train.build_engine import build_engine
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed

GPIPE, CPU = {"kind": "gpipe"}, torch.device("cpu")
Settings = dict[str, Any]


def build_config(parity_model: ParityModel, layout: Settings, **sections: Settings) -> RunConfig:
    """The run of a parity model in micro-batches of one sequence."""
    batch = {"sequence_length": parity_model.length, "sequences": SEQUENCES, "micro_sequences": 1}
    train = {"precision": "fp32", "threads_per_process": 1, "tokens": 20 * SEQUENCES * parity_model.length}
    settings: Settings = {"model": parity_model.model, "layout": layout, "batch": batch, "train": train}
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return RunConfig.model_validate(settings)


def train_steps(engine: Engine, config: RunConfig, parity_model: ParityModel, steps: range) -> list[tuple[float, ...]]:
    """Loss, norm and the reported balance of each step."""
    layout, found = config.resolve_layout(get_world_size()), []
    place = {"rank": layout.get_data_rank(get_rank()), "ranks": layout.data_parallel_size, "micro": 1}
    for step in steps:
        result = engine.train_step(build_micro_batches(parity_model, step, **place, is_bitwise=False), RATE)
        load = update_expert_balance(engine.module).read_report()
        found.append((result.loss, result.gradient_norm, *load.balance, *load.router_z))
    return found


def gather_state(engine: Engine) -> dict[str, Any]:
    """Every tensor of the training state, from all stages. Copies in two stages must have the same bits."""
    merged: dict[str, Any] = {}
    for part in all_gather_object({n: gather_full_tensor(t).numpy() for n, t in engine.get_state().tensors.items()}):
        for name, value in part.items():
            assert np.array_equal(merged.setdefault(name, value), value), f"{name} differs between ranks"
    return merged


# Equal to the last bit: the same micro-batches in the same order, and nothing is shared between stages.
UNTIED = ParityModel(
    "four layers, first dense",
    DEEP.model.model_copy(update={"tie_word_embeddings": False, "multi_token_prediction": None}),
)
BITWISE: dict[str, tuple[Settings, Settings]] = {
    "gpipe": ({"pipeline": 2, "pipeline_schedule": GPIPE}, {}),
    "1f1b": ({"pipeline": 2, "layers_per_stage": [3, 1]}, {"train": {"ema_half_life_tokens": 500}}),
    "interleaved": ({"pipeline": 2, "pipeline_schedule": INTERLEAVED}, {"optimizer": {"kind": "muon"}}),
}


def run_bitwise_cases(rank: int) -> dict[str, Any]:
    """Two steps of each case; on one process without a pipeline."""
    found = {}
    for name, (layout, sections) in BITWISE.items():
        config = build_config(UNTIED, layout if get_world_size() > 1 else {}, **sections)
        engine = build_engine(config, build_device_meshes(config.resolve_layout(get_world_size()), CPU), CPU)
        steps = train_steps(engine, config, UNTIED, range(2))
        [batch] = build_micro_batches(UNTIED, 0, rank=0, ranks=1, micro=SEQUENCES, is_bitwise=False)
        logits_BTV = engine.compute_logits(batch)  # with the average, where there is one
        found[name] = {"steps": steps, "state": gather_state(engine), "logits": logits_BTV.numpy()}
        found[name]["skipped"] = skip_step(engine, config)
    return found


def skip_step(engine: Engine, config: RunConfig) -> list[tuple[float, float]]:
    """What every rank is asked about a step that is refused, which must change nothing."""
    before, asked = gather_state(engine), []

    def refuse(loss: float, norm: float) -> bool:
        asked.append((loss, norm))
        return False

    batches = build_micro_batches(UNTIED, 7, rank=0, ranks=1, micro=1, is_bitwise=False)
    assert not engine.train_step(batches, RATE, refuse).is_applied
    update_expert_balance(engine.module, applied=False)
    assert all(np.array_equal(value, before[name]) for name, value in gather_state(engine).items())
    return asked


def run_one_rank(rank: int) -> dict[str, Any]:
    """The cases of two ranks and the journey of four, without a pipeline."""
    return run_bitwise_cases(rank) | {"journey": travel(None)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    [found] = run_ranks(run_one_rank, 1)
    return dict(found)


def test_every_schedule_gives_the_bits_of_one_process(alone: dict[str, Any]) -> None:
    pipelined = run_ranks(run_bitwise_cases, 2)
    for name in BITWISE:
        expected = alone[name]
        for found in (rank[name] for rank in pipelined):
            # The norm is summed in another order; everything else is not.
            np.testing.assert_allclose(found["steps"], expected["steps"], rtol=3e-7)
            np.testing.assert_allclose(found["skipped"], expected["skipped"], rtol=3e-7)
            assert found["state"].keys() == expected["state"].keys()
            for key, value in expected["state"].items():
                assert np.array_equal(found["state"][key], value), (name, key)
            assert np.array_equal(found["logits"], expected["logits"]), name


LOOP = (("pipeline", 2), ("pipeline_schedule", INTERLEAVED))
PARITY: dict[str, ParityCase] = {
    case.title: case
    for case in (
        ParityCase(4, "fsdp", (("pipeline", 4),), "fp32", "selective", DEEP, 2),
        ParityCase(4, "fsdp", (*LOOP, ("expert", 2)), "fp32", "full", DEEP, 1),
        ParityCase(4, "fsdp", (("pipeline", 2), ("tensor", 2)), "fp32", "none", LATENT, 2),
        ParityCase(4, "fsdp", (("pipeline", 2), ("replicate", 2)), "fp32", "none", EXPERTS, 2),
    )
}  # fmt: skip
JOURNEY: list[Settings] = [
    {"pipeline": 2, "shard": 2},
    {"pipeline": 4, "pipeline_schedule": GPIPE},
    {"shard": 4, "expert": 2},
    {"pipeline": 2, "pipeline_schedule": INTERLEAVED, "context": 2},
]
LEG_STEPS = 2
EXPECTED = "expected.pt"


def run_four_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """The distance of each parity case, and the journey of a checkpoint through layouts."""
    expected: dict[str, Trajectory] = torch.load(folder / EXPECTED, weights_only=False)
    distances = {title: compare_to_reference(case, expected[case.parity_model.name]) for title, case in PARITY.items()}
    return {"distances": distances, "journey": travel(folder)}


def travel(folder: Path | None) -> dict[str, Any]:
    """Train under each layout, each begun from the checkpoint of the one before; without a folder in one go."""
    steps: list[tuple[float, ...]] = []
    for leg, layout in enumerate(JOURNEY if folder is not None else [{}]):
        config = build_config(DEEP, layout)
        engine = build_engine(config, build_device_meshes(config.resolve_layout(get_world_size()), CPU), CPU)
        if folder is None:
            steps += train_steps(engine, config, DEEP, range(LEG_STEPS * len(JOURNEY)))
            return {"steps": steps, "state": gather_state(engine)}
        if leg:
            newest = checkpoint_load.find_newest_checkpoint(folder)
            assert newest is not None
            checkpoint_load.load_checkpoint(engine, newest)
        steps += train_steps(engine, config, DEEP, range(LEG_STEPS * leg, LEG_STEPS * (leg + 1)))
        path = checkpoint_load.save_checkpoint(engine, folder, {"leg": leg}, keep_last=len(JOURNEY))
    return {"steps": steps, "state": gather_state(engine), "rejected": load_into_another_model(path)}


def load_into_another_model(checkpoint: Path) -> str:
    """The error of a model with one layer more, of which only the last stage lacks tensors."""
    deeper = ParityModel("deeper", DEEP.model.model_copy(update={"num_hidden_layers": 5}))
    config = build_config(deeper, {"pipeline": 4})
    engine = build_engine(config, build_device_meshes(config.resolve_layout(4), CPU), CPU)
    with pytest.raises(CheckpointError) as raised:
        checkpoint_load.load_checkpoint(engine, checkpoint)
    return str(raised.value)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("journey")
    # In a file: a process that is forked from a server takes few tensors.
    torch.save(
        {model.name: compute_reference_trajectory(model) for model in (DEEP, LATENT, EXPERTS)}, folder / EXPECTED
    )
    return run_ranks(run_four_ranks, 4, folder)


def test_pipelines_with_other_axes_follow_the_reference_run(four_ranks: list[dict[str, Any]]) -> None:
    for title in PARITY:
        assert all(rank["distances"][title].passed for rank in four_ranks), four_ranks[0]["distances"][title]


def test_a_checkpoint_goes_into_and_out_of_pipelines(four_ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    expected = alone["journey"]
    for found in (rank["journey"] for rank in four_ranks):
        np.testing.assert_allclose(found["steps"], expected["steps"], rtol=1e-4, atol=1e-6)
        assert found["state"].keys() == expected["state"].keys()
        for key, value in expected["state"].items():
            allowed = 0.05 * RATE if key.startswith("parameter/") else 2e-3 * float(np.abs(value).max())
            assert float(np.abs(found["state"][key] - value).max()) <= allowed, key
        # Ranks whose own tensors are all there find it too.
        assert "buffer/blocks.4.feed_forward.balance_bias_E is missing" in found["rejected"]
