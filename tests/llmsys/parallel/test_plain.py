"""Plain data parallelism: the bits of FSDP2, without its wrapper."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.engine.ema_engine import EmaEngine
from llmsys.engine.engine import GradientProbe, StepResult
from llmsys.engine.state_hash import hash_state
from llmsys.engine.torch_engine import TorchEngine
from llmsys.model.transformer import Transformer
from llmsys.parallel import master_shards
from llmsys.parallel.block_compilation import compile_blocks
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.fp8 import convert_to_fp8
from llmsys.parallel.plain import PlainModel
from llmsys.train import checkpoint_load
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parity_runs import LEARNING_RATE, OPTIMIZER, build_engine, select_rank_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_sequences, build_tiny_config

BERT = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    family="encoder",
    head={"kind": "mlm", "pooler": True, "next_sentence": True},
)
MODELS: dict[str, ModelConfig] = {
    "experts and prediction modules": build_tiny_config(),
    "tied": build_tiny_config(moe=None, tie_word_embeddings=True),
    "unused parameters": BERT,
}
Run = tuple[list[StepResult], str]


def make(
    way: str,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: OptimizerConfig = OPTIMIZER,
    gradients: Any = "sharded",
    change: Any = None,
) -> TorchEngine:
    device, ranks = torch.device("cpu"), torch.distributed.get_world_size()
    with torch.device("meta"):
        model = Transformer(config)
    if change is not None:
        change(model)
    return TorchEngine(
        model,
        meshes=build_device_meshes(ParallelLayout().resolve(ranks, config), device),
        optimizer=optimizer,
        loss=build_training_loss(LossConfig()),
        compute_dtype=dtype,
        seed=7,
        device=device,
        data_parallel=way,  # type: ignore[arg-type]
        gradients=gradients,
    )


def train(engine: Any, rank: int, steps: range, micro_batches: int) -> Run:
    ranks = torch.distributed.get_world_size()
    results = [
        engine.train_step(select_rank_batches(step, rank, ranks, micro_batches), LEARNING_RATE)
        for step in steps
    ]
    return results, hash_state(engine.get_state())


def compile_eagerly(model: Transformer) -> None:
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")


def emulate_fp8(model: Transformer) -> None:
    convert_to_fp8(model, emulate=True)
    assert any(hasattr(module, "multiply") for module in model.modules())


WIDE = build_tiny_config(moe=None, hidden_size=32, head_dim=16, intermediate_size=48)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"config": config} for name, config in MODELS.items()},
    "float32": {"config": MODELS["tied"], "dtype": torch.float32},
    "float16": {"config": MODELS["tied"], "dtype": torch.float16},
    "muon": {"config": MODELS["tied"], "optimizer": MuonConfig(learning_rate=LEARNING_RATE)},
    "moments of 8 bits": {
        "config": MODELS["tied"],
        "optimizer": AdamWConfig(learning_rate=LEARNING_RATE, moments="int8"),
    },
    "fp8": {"config": WIDE, "change": emulate_fp8},
    "compiled": {"config": MODELS["tied"], "change": compile_eagerly},
    "clipped logits": {
        "config": MODELS["tied"],
        "optimizer": AdamWConfig(learning_rate=LEARNING_RATE, max_attention_logit=1e-3),
    },
}


# Four ranks cut the masters into other shards, which matters to what is updated by more than one
# element at a time; the rest of a case is the same as on two.
ON_FOUR = ("experts and prediction modules", "muon", "moments of 8 bits")


def run_both(rank: int) -> dict[str, tuple[Run, Run]]:
    """Train each case by FSDP2 and plain, on one rank with two micro-batches; on several FSDP2 sums
    over micro-batches first too.
    """
    ranks = torch.distributed.get_world_size()
    gradients = "sharded" if ranks == 1 else "whole"
    found = {}
    for name in ON_FOUR if ranks == 4 else CASES:
        case = CASES[name]
        torch.manual_seed(3)
        expected = train(make("fsdp", gradients=gradients, **case), rank, range(3), 2)
        torch.manual_seed(3)
        found[name] = train(make("plain", **case), rank, range(3), 2), expected
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_plain_has_the_bits_of_fsdp_after_every_step(ranks: int) -> None:
    for by_case in run_ranks(run_both, ranks):
        for name, (ours, theirs) in by_case.items():
            assert ours == theirs, name


def change_between_steps(rank: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Return pairs that must be equal, of runs that change from FSDP2 to plain and back."""
    config = MODELS["experts and prediction modules"]
    undisturbed = train(make("fsdp", config), rank, range(4), 1)
    first = make("plain", config)
    before = train(first, rank, range(1), 1)[0]
    results = before
    for number, way in enumerate(("fsdp", "plain", "fsdp"), start=1):
        later = make(way, config)
        checkpoint_load.load_checkpoint(later, save_checkpoint(first, folder / str(number), {}, 1))
        results = results + train(later, rank, range(number, number + 1), 1)[0]
        first = later
    return {"checkpoints": ((results, hash_state(first.get_state())), undisturbed)}


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_change_between_plain_and_fsdp_at_every_step(
    tmp_path: Path, ranks: int
) -> None:
    for pairs in run_ranks(change_between_steps, ranks, tmp_path):
        for name, (found, expected) in pairs.items():
            assert found == expected, name


def average_weights(rank: int) -> list[tuple[Any, Any]]:
    """Return logits before, between and after steps, under plain and FSDP2 with an average of
    weights.
    """
    found = []
    for way in ("plain", "fsdp"):
        engine = EmaEngine(make(way, MODELS["tied"]), half_life_tokens=100)
        logits = []
        for step in range(3):
            logits.append(engine.compute_logits(build_sequences(9, 0, 2)))
            train(engine, rank, range(step, step + 1), 1)
        # Whoever runs the model itself gets the masters of now too.
        engine.get_state()
        with torch.no_grad():
            logits.append(engine.module.eval()(build_sequences(9, 0, 2).tokens_BT))
        found.append([one.tolist() for one in logits if one is not None])
    return list(zip(*found, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluations_read_the_masters_of_the_moment(ranks: int) -> None:
    for pairs in run_ranks(average_weights, ranks):
        for ours, theirs in pairs:
            assert ours == theirs
        assert len(pairs) == 4
        assert pairs[0][0] != pairs[1][0] != pairs[2][0] != pairs[3][0]


def run_bitwise(rank: int) -> dict[str, Run]:
    ranks, runs = torch.distributed.get_world_size(), {}
    for way in ("bitwise", "bitwise plain"):
        for dtype in ("", " bf16"):
            engine = build_engine(way + dtype, ParallelLayout(), 0.5, 1)
            results = [
                # Micro-batch i of rank r is number i · W + r of the step.
                engine.train_step(
                    [build_sequences(step, 2 * (i * ranks + rank), 2) for i in range(4 // ranks)],
                    LEARNING_RATE,
                )
                for step in range(3)
            ]
            runs[way + dtype] = results, hash_state(engine.get_state())
    return runs


@pytest.mark.distributed
def test_bitwise_mode_has_one_result_with_and_without_a_wrapper_on_any_number_of_ranks() -> None:
    runs = [run_ranks(run_bitwise, ranks)[0] for ranks in (1, 2, 4)]
    for dtype in ("", " bf16"):
        expected = runs[0]["bitwise" + dtype]
        for found in runs:
            assert found["bitwise" + dtype] == expected
            assert found["bitwise plain" + dtype] == expected


def measure_partial_norms(rank: int) -> list[list[float]]:
    found = []
    for way in ("plain", "fsdp"):
        engine = make(way, MODELS["tied"])
        norms: list[float] = []

        def look(engine: TorchEngine = engine, norms: list[float] = norms) -> None:
            norms.append(engine.compute_partial_norm())

        engine.gradient_probe = GradientProbe(1, look)
        result = train(engine, rank, range(1), 2)[0][0]
        found.append([*norms, result.gradient_norm])
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_has_its_own_norm_for_the_noise_scale(ranks: int) -> None:
    for ours, theirs in run_ranks(measure_partial_norms, ranks):
        assert ours == theirs
        first, whole = ours
        assert 0 < first != whole


def cut_in_small_buckets(rank: int) -> list[int]:
    """Return the numbers of messages of two runs with equal results."""
    counts, hashes = [], set()
    for size in (master_shards.BUCKET, 500):
        with patch.object(master_shards, "BUCKET", size):
            engine = make("plain", MODELS["tied"])
        hashes.add(train(engine, rank, range(2), 2)[1])
        model = engine._data_parallel
        assert isinstance(model, PlainModel)
        assert model._shards is not None
        counts.append(len(model._shards._buckets))
    assert len(hashes) == 1
    return counts


@pytest.mark.distributed
def test_the_size_of_messages_changes_nothing() -> None:
    for whole, small in run_ranks(cut_in_small_buckets, 2):
        assert whole == 1
        assert small > 5


def list_tensors(rank: int) -> dict[str, Any]:
    engine = make("plain", MODELS["tied"])
    model = engine._data_parallel
    assert isinstance(model, PlainModel)
    local = [getattr(one, "to_local", lambda one=one: one)() for one in model.masters.values()]
    return {
        "weights": [(tuple(one.shape), one.dtype) for one in engine.module.parameters()],
        "whole": [tuple(one.shape) for one in model.masters.values()],
        "elements": sum(one.numel() for one in local),
        "dtypes": {one.dtype for one in local},
        "ties": engine.module.get_parameter("head.weight") is engine.module.embed.weight,
    }


@pytest.mark.distributed
def test_weights_are_whole_in_16_bits_and_masters_in_float32_shards() -> None:
    found = run_ranks(list_tensors, 2)
    whole = sum(torch.Size(shape).numel() for shape, _ in found[0]["weights"])
    assert sum(one["elements"] for one in found) == whole
    assert max(one["elements"] for one in found) < 0.55 * whole
    for one in found:
        assert one["ties"]
        assert one["dtypes"] == {torch.float32}
        assert one["weights"] == [(shape, torch.bfloat16) for shape in one["whole"]]
