"""A pipeline against one process: every gradient, the norm, the balance of experts, checkpoints,
and skipped steps.
"""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from llmsys.config.position import NtkRopeScalingConfig, RopeConfig
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.doctor.parity_check import compare_to_reference, gather_full_tensor
from llmsys.doctor.parity_matrix import INTERLEAVED, ParityCase
from llmsys.doctor.parity_models import DEEP, DENSE, LATENT, SEQUENCES, ParityModel
from llmsys.doctor.parity_reference import RATE, Trajectory, compute_reference_trajectory
from llmsys.doctor.parity_rows import build_micro_batches
from llmsys.engine.engine import Engine, GradientProbe
from llmsys.engine.state_hash import hash_state
from llmsys.errors import CheckpointError
from llmsys.events import read_latest_events
from llmsys.generate.text_generation import generate_texts
from llmsys.model.kv_cache import KeyValueCache
from llmsys.parallel.block_wrapping import wrap_blocks
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.fp8 import convert_experts_to_fp8, convert_to_fp8
from llmsys.parallel.process_group import all_gather_object, get_rank, get_world_size
from llmsys.train import build_engine as build_engine_module
from llmsys.train import checkpoint_load
from llmsys.train.build_engine import build_engine
from llmsys.train.build_trainer import build_trainer
from llmsys.train.checkpoint_load import read_tensor_metadata
from llmsys.train.expert_load import update_expert_balance
from llmsys.train.trainer import Trainer
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed

GPIPE, CPU = {"kind": "gpipe"}, torch.device("cpu")
Settings = dict[str, Any]


def build_config(parity_model: ParityModel, layout: Settings, **sections: Settings) -> RunConfig:
    """The run of a parity model in micro-batches of one sequence."""
    batch = {"sequence_length": parity_model.length, "sequences": SEQUENCES, "micro_sequences": 1}
    train = {
        "precision": "fp32",
        "threads_per_process": 1,
        "tokens": 20 * SEQUENCES * parity_model.length,
    }
    settings: Settings = {
        "model": parity_model.model,
        "layout": layout,
        "batch": batch,
        "train": train,
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return RunConfig.model_validate(settings)


def train_steps(
    engine: Engine, config: RunConfig, parity_model: ParityModel, steps: range
) -> list[tuple[float, ...]]:
    """Loss, norm and the reported balance of each step."""
    layout, found = config.resolve_layout(get_world_size()), []
    ranks, rank = layout.data_parallel_size, layout.get_data_rank(get_rank())
    for step in steps:
        # Every ranks-th one, as bitwise mode assigns them.
        batches = build_micro_batches(
            parity_model, step, rank=0, ranks=1, micro=1, is_bitwise=False
        )[rank::ranks]
        result = engine.train_step(batches, RATE)
        load = update_expert_balance(engine.module).read_report()
        found.append((result.loss, result.gradient_norm, *load.balance, *load.router_z))
    return found


def gather_state(engine: Engine) -> dict[str, Any]:
    """Every tensor of the training state, from all stages. Copies in two stages must have the
    same bits.
    """
    merged: dict[str, Any] = {}
    for part in all_gather_object(
        {n: gather_full_tensor(t).numpy() for n, t in engine.get_state().tensors.items()}
    ):
        for name, value in part.items():
            assert np.array_equal(merged.setdefault(name, value), value), (
                f"{name} differs between ranks"
            )
    return merged


# Equal to the last bit: the same micro-batches in the same order, and nothing is shared between
# stages. The norm is summed in another order, so there is no clipping by it.
UNCLIPPED = {"kind": "adamw", "max_grad_norm": 0}
UNTIED = ParityModel(
    "four layers, first dense",
    DEEP.model.model_copy(update={"tie_word_embeddings": False, "multi_token_prediction": None}),
)
PROMPTS = ("AB", "longer", "")


class Characters:
    """A tokenizer with one token per character."""

    vocab_size, bos_id, eos_id = 61, 0, 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 60 + 1 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(64 + token) for token in ids)


BITWISE_MODE = "bitwise mode"
BITWISE: dict[str, tuple[Settings, Settings]] = {
    "gpipe, fp8": (
        {"pipeline": 2, "pipeline_schedule": GPIPE},
        {
            "optimizer": UNCLIPPED,
            "train": {"precision": "bf16", "matmul_dtype": "fp8", "expert_matmul_dtype": "fp8"},
        },
    ),
    "1f1b": (
        {"pipeline": 2, "layers_per_stage": [3, 1]},
        {"train": {"ema_half_life_tokens": 500}, "optimizer": UNCLIPPED},
    ),
    "interleaved, compiled": (
        {"pipeline": 2, "pipeline_schedule": INTERLEAVED},
        {"optimizer": {"kind": "muon", "max_grad_norm": 0}, "train": {"compile": "block"}},
    ),
    BITWISE_MODE: (
        {"pipeline": 2, "pipeline_schedule": INTERLEAVED},
        {"train": {"reproducibility": "bitwise"}},
    ),
}
ON_FOUR = {BITWISE_MODE: ({"pipeline": 2, "expert": 2}, {"train": {"reproducibility": "bitwise"}})}


def run_bitwise_cases(
    rank: int, cases: dict[str, tuple[Settings, Settings]] = BITWISE
) -> dict[str, Any]:
    """Two steps of each case; on one process without a pipeline."""
    found: dict[str, Any] = {}
    for name, (layout, sections) in cases.items():
        config = build_config(UNTIED, layout if get_world_size() > 1 else {}, **sections)
        # On CPUs fp8 is emulated, and the eager backend of torch.compile costs less than generated
        # code.
        with (
            patch.object(
                build_engine_module, "convert_to_fp8", partial(convert_to_fp8, emulate=True)
            ),
            patch.object(
                build_engine_module,
                "convert_experts_to_fp8",
                partial(convert_experts_to_fp8, emulate=True),
            ),
            patch.object(
                build_engine_module, "wrap_blocks", partial(wrap_blocks, backend="aot_eager")
            ),
        ):
            engine = build_engine(
                config, build_device_meshes(config.resolve_layout(get_world_size()), CPU), CPU
            )
        steps = train_steps(engine, config, UNTIED, range(2))
        [batch] = build_micro_batches(UNTIED, 0, rank=0, ranks=1, micro=SEQUENCES, is_bitwise=False)
        logits_BTV = engine.compute_logits(batch)  # with the average, where there is one
        logits = None if logits_BTV is None else logits_BTV.float().numpy()
        found[name] = {"steps": steps, "state": gather_state(engine), "logits": logits}
        found[name]["hash"] = hash_state(engine.get_state())
        # Rows end at their own limits and leave the cache.
        found[name]["texts"] = generate_texts(
            engine.module, cast(Any, Characters()), PROMPTS, max_new_tokens=5
        )
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


def run_one_rank(rank: int, folder: Path) -> dict[str, Any]:
    """The cases of two ranks and the whole journey, without a pipeline."""
    travel(folder, "calm", [{}], range(1))
    return run_bitwise_cases(rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pipeline")
    make_dataset(made / "data")
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    [found] = run_ranks(run_one_rank, 1, folder)
    return dict(found)


def test_every_schedule_gives_the_bits_of_one_process(alone: dict[str, Any]) -> None:
    pipelined = run_ranks(run_bitwise_cases, 2)
    for name in BITWISE:
        expected = alone[name]
        for found in (rank[name] for rank in pipelined):
            # In bitwise mode the norm is one of the bits.
            allowed = 0.0 if name == BITWISE_MODE else 3e-7
            np.testing.assert_allclose(found["steps"], expected["steps"], rtol=allowed)
            np.testing.assert_allclose(found["skipped"], expected["skipped"], rtol=allowed)
            assert found["hash"] == expected["hash"], name
            assert found["texts"] == expected["texts"], name
            assert found["state"].keys() == expected["state"].keys()
            for key, value in expected["state"].items():
                assert np.array_equal(found["state"][key], value), (name, key)
        assert pipelined[0][name]["logits"] is None
        assert np.array_equal(pipelined[1][name]["logits"], expected["logits"]), name
        assert len(set(expected["texts"])) > 1


# (model, layout of two ranks, sections, micro-batches that the probe looks at). Copies of one
# embedding are in two stages; parts of a step fill the pipeline or do not.
PROBED: dict[str, tuple[ParityModel, Settings, Settings, int]] = {
    "tied, 1f1b": (DEEP, {"pipeline": 2}, {}, 1),
    "tied, gpipe, all but one": (
        DEEP,
        {"pipeline": 2, "pipeline_schedule": GPIPE},
        {},
        SEQUENCES - 1,
    ),
    "whole gradients, interleaved": (
        UNTIED,
        {"pipeline": 2, "pipeline_schedule": INTERLEAVED},
        {"engine": {"kind": "torch", "gradient_accumulation": "whole"}},
        2,
    ),
    BITWISE_MODE: (
        UNTIED,
        {"pipeline": 2, "pipeline_schedule": INTERLEAVED},
        {"train": {"reproducibility": "bitwise"}},
        SEQUENCES // 2,
    ),
}


def run_probed_steps(rank: int) -> dict[str, Any]:
    """(norm of the part, loss, norm of the step) and the state after it, of each case; a step that
    nobody looks into follows.
    """
    found = {}
    for name, (parity_model, layout, sections, count) in PROBED.items():
        config = build_config(parity_model, layout if get_world_size() > 1 else {}, **sections)
        meshes = build_device_meshes(config.resolve_layout(get_world_size()), CPU)
        engine: Any = build_engine(config, meshes, CPU)
        parts: list[float] = []

        def look(engine: Any = engine, parts: list[float] = parts) -> None:
            parts.append(engine.compute_partial_norm())

        engine.gradient_probe = GradientProbe(count, look)
        steps = train_steps(engine, config, parity_model, range(1))
        engine.gradient_probe = None
        steps += train_steps(engine, config, parity_model, range(1, 2))
        found[name] = {"parts": parts, "steps": steps, "state": gather_state(engine)}
    return found


def test_a_part_of_a_step_has_the_norm_that_it_has_in_one_process_and_changes_nothing() -> None:
    [alone] = run_ranks(run_probed_steps, 1)
    for found in run_ranks(run_probed_steps, 2):
        for name, expected in alone.items():
            allowed = 0.0 if name == BITWISE_MODE else 1e-5
            assert len(expected["parts"]) == 1
            assert 0 < expected["parts"][0] < expected["steps"][0][1] * 2
            np.testing.assert_allclose(found[name]["parts"], expected["parts"], rtol=allowed)
            np.testing.assert_allclose(found[name]["steps"], expected["steps"], rtol=allowed)
            for key, value in expected["state"].items():
                np.testing.assert_allclose(
                    found[name]["state"][key], value, rtol=allowed, atol=1e-6 * bool(allowed)
                )


# Their frequencies change with each token beyond the fourth, so all are computed again.
GROWING = ParityModel(
    "frequencies that depend on the length",
    DENSE.model.model_copy(
        update={
            "num_hidden_layers": 4,
            "position": RopeConfig(
                scaling=NtkRopeScalingConfig(factor=2.0, original_max_position_embeddings=4)
            ),
        }
    ),
)


def complete_growing_texts(rank: int, layout: Settings) -> tuple[list[str], list[float]]:
    """Texts, and the first logits of each next token of a text that is read token by token."""
    config = build_config(GROWING, layout)
    meshes = build_device_meshes(config.resolve_layout(get_world_size()), CPU)
    engine = build_engine(config, meshes, CPU)
    train_steps(engine, config, GROWING, range(2))
    texts = generate_texts(engine.module, cast(Any, Characters()), PROMPTS, max_new_tokens=8)
    tokens_BT = torch.arange(1, 17)[None]
    cache = KeyValueCache(config.model, 1, tokens_BT.shape[1])
    run = engine.module.run_pipeline or (lambda tokens, cache: engine.module(tokens, cache=cache))
    with torch.no_grad():
        logits = [run(tokens_BT[:, t : t + 1], cache).flatten()[:3] for t in range(16)]
    return list(texts), torch.cat(logits).tolist()


def test_stages_complete_texts_whose_rotations_change_with_their_length() -> None:
    [(alone, logits)] = run_ranks(complete_growing_texts, 1, {})
    assert len(set(alone)) > 1
    for schedule in ({"kind": "1f1b"}, INTERLEAVED):
        layout = {"pipeline": 2, "pipeline_schedule": schedule}
        for texts, found in run_ranks(complete_growing_texts, 2, layout):
            assert texts == alone
            np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-6)


LOOP = (("pipeline", 2), ("pipeline_schedule", INTERLEAVED))
# Pairs of a pipeline with replicas, context and recomputation are in the covering array
# (llmsys/doctor/pairs).
PARITY: dict[str, ParityCase] = {
    case.title: case
    for case in (
        ParityCase(4, "fsdp", (("pipeline", 4),), "fp32", "selective", DEEP, 2),
        ParityCase(4, "fsdp", (*LOOP, ("expert", 2)), "fp32", "full", DEEP, 1),
        ParityCase(4, "fsdp", (("pipeline", 2), ("tensor", 2)), "fp32", "none", LATENT, 2),
    )
}  # fmt: skip
JOURNEY: list[Settings] = [
    {"pipeline": 2, "shard": 2},
    {"pipeline": 4, "pipeline_schedule": INTERLEAVED},
    {"shard": 4, "expert": 2},
    {},
]
LEG_STEPS, JOURNEY_SEQUENCES = 5, 4
JOURNEY_MODEL = DEEP.model.model_copy(update={"num_hidden_layers": 8, "vocab_size": VOCABULARY})
EXPECTED = "expected.pt"


def run_four_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """The distance of each parity case, and the journey of a run through layouts."""
    expected: dict[str, Trajectory] = torch.load(folder / EXPECTED, weights_only=False)
    distances = {
        title: compare_to_reference(case, expected[case.parity_model.name])
        for title, case in PARITY.items()
    }
    travel(folder, "journey", JOURNEY, range(len(JOURNEY) - 1))
    bitwise = run_bitwise_cases(rank, ON_FOUR)[BITWISE_MODE]
    return {
        "distances": distances,
        "bitwise": bitwise,
        "rejected": load_into_another_model(get_checkpoint(folder, "journey", 1)),
    }


class KilledError(Exception):
    """The end of a run in the middle of a step."""


def arrive(rank: int, folder: Path) -> None:
    """The last leg of the journey, in one process."""
    travel(folder, "journey", JOURNEY, range(len(JOURNEY) - 1, len(JOURNEY)))


def travel(folder: Path, name: str, layouts: list[Settings], legs: range) -> None:
    """Train a run whose layout changes: it ends in a step, and is continued from its last
    checkpoint.
    """
    steps = LEG_STEPS * len(JOURNEY)
    sections: dict[str, Settings] = {
        "run": {"folder": str(folder / name)},
        "data": {"kind": "crawl", "folder": str(folder / "data")},
        "tokenizer": {"kind": "sentencepiece", "vocab_size": VOCABULARY},
        "batch": {"sequences": JOURNEY_SEQUENCES},
        "train": {"tokens": steps * JOURNEY_SEQUENCES * DEEP.length, "log_every_steps": 1},
        "checkpoint": {"every_steps": LEG_STEPS, "keep_last": steps},
        "evaluation": {"every_steps": LEG_STEPS, "micro_sequences": 8, "max_tokens": 500},
    }
    for leg in legs:
        config = build_config(ParityModel("journey", JOURNEY_MODEL), layouts[leg], **sections)
        with contextlib.ExitStack() as stack:
            trainer = build_trainer(config, stack, lambda *_: [])
            if leg == len(layouts) - 1:
                trainer.train()
                return
            kill_in_step(trainer, LEG_STEPS * (leg + 1))
            with pytest.raises(KilledError):
                trainer.train()


def kill_in_step(trainer: Trainer, last: int) -> None:
    begin_step = trainer.observability.begin_step

    def begin_or_die(step: int, batches: list[Batch]) -> list[Batch]:
        if step == last:
            raise KilledError
        return begin_step(step, batches)

    trainer.observability.begin_step = begin_or_die  # type: ignore[method-assign]


def get_checkpoint(folder: Path, name: str, legs: int) -> Path:
    return folder / name / "checkpoints" / f"step-{LEG_STEPS * legs:08d}"


def load_into_another_model(checkpoint: Path) -> str:
    """The error of a model with one layer more, of which only the last stage lacks tensors."""
    deeper = ParityModel("deeper", JOURNEY_MODEL.model_copy(update={"num_hidden_layers": 9}))
    config = build_config(deeper, {"pipeline": 4})
    engine = build_engine(config, build_device_meshes(config.resolve_layout(4), CPU), CPU)
    with pytest.raises(CheckpointError) as raised:
        checkpoint_load.load_checkpoint(engine, checkpoint)
    return str(raised.value)


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> list[dict[str, Any]]:
    # In a file: a process that is forked from a server takes few tensors.
    torch.save(
        {model.name: compute_reference_trajectory(model) for model in (DEEP, LATENT)},
        folder / EXPECTED,
    )
    return run_ranks(run_four_ranks, 4, folder)


def test_pipelines_with_other_axes_follow_the_reference_run(
    four_ranks: list[dict[str, Any]],
) -> None:
    for title in PARITY:
        assert all(rank["distances"][title].passed for rank in four_ranks), four_ranks[0][
            "distances"
        ][title]


def test_bitwise_mode_has_one_result_on_stages_and_experts(
    alone: dict[str, Any], four_ranks: list[dict[str, Any]]
) -> None:
    expected = alone[BITWISE_MODE]
    for found in (rank["bitwise"] for rank in four_ranks):
        assert (found["steps"], found["hash"]) == (expected["steps"], expected["hash"])


@pytest.mark.usefixtures("alone")
def test_a_killed_run_goes_on_into_and_out_of_pipelines(
    four_ranks: list[dict[str, Any]], folder: Path
) -> None:
    run_ranks(arrive, 1, folder)
    found, expected = (
        read_latest_events(folder / name / "events.jsonl") for name in ("journey", "calm")
    )
    for kind in ("step", "experts", "evaluation"):
        for one, other in zip(
            select_events(found, kind), select_events(expected, kind), strict=True
        ):
            assert {name: one[name] for name in ("step", "batch_digest") if name in other} == {
                name: other[name] for name in ("step", "batch_digest") if name in other
            }
            for name in {
                "loss",
                "gradient_norm",
                "learning_rate",
                "load",
                "balance",
                "router_z",
            } & other.keys():
                np.testing.assert_allclose(
                    one[name], other[name], rtol=1e-4, atol=1e-6, err_msg=f"{kind} {name}"
                )
    state, wanted = (
        read_checkpoint(get_checkpoint(folder, name, len(JOURNEY))) for name in ("journey", "calm")
    )
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        allowed = 0.05 * 1e-3 if name.startswith("parameter/") else 2e-3 * float(value.abs().max())
        assert float((state[name] - value).abs().max()) <= allowed, name
    # Ranks whose own tensors are all there find it too.
    assert all(
        "buffer/blocks.8.feed_forward.balance_bias_E is missing" in rank["rejected"]
        for rank in four_ranks
    )


def select_events(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Events of a kind; of a step that was trained twice the second one."""
    return list({event["step"]: event for event in events if event["event"] == kind}.values())


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Every tensor, as convert and generate read it: in one process."""
    tensors = {
        name: torch.empty_like(one, device=CPU) for name, one in read_tensor_metadata(path).items()
    }
    checkpoint_load.load_tensors(tensors, path)
    return tensors
