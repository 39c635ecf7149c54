"""Norms by layer equal those of plain operations in one process, under every engine and layout."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.packed_windows import PADDING
from llmsys.engine.ema_engine import EmaEngine
from llmsys.engine.engine import EngineState
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.train.norm_meter import NormMeter, get_layer_name
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    build_engine,
    run_reference,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import LENGTH, SEQUENCES, build_sequences, build_tiny_config

CLIP = 0.5
MOE: dict[str, Any] = {}
DENSE: dict[str, Any] = {"moe": None, "tie_word_embeddings": True}
PIPELINE = ParallelLayout.model_validate({"pipeline": 2, "pipeline_schedule": {"kind": "gpipe"}})
CASES: dict[str, tuple[str, ParallelLayout, dict[str, Any]]] = {
    "fsdp expert=2": ("torch", ParallelLayout(expert=2), MOE),
    "fsdp, blocks recomputed": ("torch full", ParallelLayout(), DENSE),
    "ddp": ("torch ddp", ParallelLayout(replicate=2), DENSE),
    "tensor": ("torch", ParallelLayout(tensor=2), DENSE),
    "context": ("torch", ParallelLayout(context=2), DENSE),
    "pipeline": ("torch", PIPELINE, DENSE),
    "bitwise expert=2": ("bitwise", ParallelLayout(expert=2), MOE),
    "accelerate": ("accelerate", ParallelLayout(), DENSE),
    "zero0 expert=2": ("zero0", ParallelLayout(expert=2), MOE),
    "zero2 expert=2": ("zero2", ParallelLayout(expert=2), MOE),
    "zero3": ("zero3", ParallelLayout(), DENSE),
}


def compute_reference(changes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The norms of the second step, from the states before and after it."""
    _, norms, after = run_reference(CLIP, steps=2, **changes)
    _, _, before = run_reference(CLIP, steps=1, **changes)
    names = [name.removeprefix("parameter/") for name in after if name.startswith("parameter/")]
    model = Transformer(build_tiny_config(**changes))
    model.load_state_dict({name: before[f"parameter/{name}"] for name in names}, strict=False)
    outputs: dict[str, Tensor] = {}
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda _, inputs, output, n=number: outputs.update({f"blocks.{n}": output})
        )
    model.train()(build_sequences(1, 0, SEQUENCES, ignored=LENGTH).tokens_BT)
    # m = 0.9 m + 0.1 g, of the clipped gradient
    clipped = {
        n: 10 * (after[f"first_moment/{n}"] - 0.9 * before[f"first_moment/{n}"]) for n in names
    }
    assert norms[1] > CLIP
    return {
        "activation": {
            layer: float(output.detach().square().mean().sqrt())
            for layer, output in outputs.items()
        },
        "gradient": sum_layers({n: gradient * norms[1] / CLIP for n, gradient in clipped.items()}),
        "update": sum_layers(
            {n: after[f"parameter/{n}"] - before[f"parameter/{n}"] for n in names}
        ),
        "weight": sum_layers({n: after[f"parameter/{n}"] for n in names}),
    }


def sum_layers(tensors: dict[str, Tensor]) -> dict[str, float]:
    layers: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        layers.setdefault(".".join(parts[:2]) if parts[0] == "blocks" else parts[0], []).append(
            tensor.flatten()
        )
    return {layer: float(torch.cat(found).norm()) for layer, found in layers.items()}


def measure_cases(rank: int, cases: list[Any]) -> list[Any]:
    """(norms of step 1, of step 2, whether nothing watches any more) of each case, and
    activations with padding.
    """
    found = []
    for kind, layout, changes in cases:
        place = (0, 1) if layout.tensor * layout.context * layout.pipeline > 1 else (rank, 2)
        engine = EmaEngine(build_engine(kind, layout, CLIP, 2, **changes), 100)
        meter, measured = NormMeter(2, engine), []
        hooks = [list(block._forward_hooks) for block in engine.module.blocks]
        for number in (1, 2):
            meter.begin_step(number)
            engine.train_step(select_rank_batches(number - 1, *place, 2), LEARNING_RATE)
            measured.append(meter.end_step())
        gone = hooks == [list(block._forward_hooks) for block in engine.module.blocks]
        found.append((*measured, gone and engine.observe_gradients is None))
    return [found, measure_padded(rank)]


def measure_padded(rank: int) -> list[dict[str, float]]:
    """Activations of nine tokens, without and with padding after them."""
    engine = build_engine("torch", ParallelLayout(), CLIP, 1, **DENSE)
    meter, found, real = NormMeter(1, engine), [], 9
    for length in (real, LENGTH):
        batch = build_sequences(0, 2 * rank, 2)
        documents_BT = torch.full((2, length), PADDING)
        documents_BT[:, :real] = 0
        targets_BT = batch.targets_BT[:, :length].masked_fill(documents_BT < 0, IGNORED)
        meter.begin_step(1)
        engine.train_step([Batch(batch.tokens_BT[:, :length], targets_BT, documents_BT)], 0.0)
        norms = meter.end_step()
        assert norms is not None
        assert norms["update"] == dict.fromkeys(norms["weight"], 0.0), "the rate is 0"
        found.append(norms["activation"])
    return found


@pytest.mark.distributed
def test_norms_equal_those_of_plain_operations_under_every_engine_and_layout() -> None:
    by_rank = run_ranks(measure_cases, 2, list(CASES.values()))
    assert by_rank[0] == by_rank[1]
    measured, (plain, padded) = by_rank[0]
    assert padded == pytest.approx(plain, rel=1e-5)
    references = {
        name: compute_reference(changes) for name, changes in (("MOE", MOE), ("DENSE", DENSE))
    }
    for (name, (_, _, changes)), (unmeasured, norms, is_gone) in zip(
        CASES.items(), measured, strict=True
    ):
        expected = references["DENSE" if changes else "MOE"]
        assert unmeasured is None, name
        assert is_gone, name
        assert norms.keys() == expected.keys()
        for kind, layers in expected.items():
            # Adam divides by the moments: of elements without a gradient rounding decides the sign
            # of the update.
            tolerance = {"activation": 1e-4, "update": 1e-2}.get(kind, 1e-3)
            assert norms[kind] == pytest.approx(layers, rel=tolerance), (name, kind)


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("blocks.11.attention.q_proj.weight", "blocks.11"),
        ("encoder.blocks.0.norm.weight", "encoder.blocks.0"),
        ("embed.weight", "embed"),
        ("prediction.0.block.attention.q_proj.weight", "prediction"),
    ],
)
def test_a_parameter_belongs_to_its_block_or_to_the_module_outside_of_blocks(
    parameter: str, layer: str
) -> None:
    assert get_layer_name(parameter) == layer


def test_the_activations_of_a_permutation_are_those_of_its_tokens() -> None:
    torch.manual_seed(0)
    head: dict[str, Any] = {"family": "encoder", "head": {"kind": "permutation"}, "moe": None}
    config = build_tiny_config(**head, position={"kind": "transformer_xl"}, num_key_value_heads=4)
    model = Transformer(config)
    initialize_parameters(model, 1)
    engine = SimpleNamespace(
        module=model,
        device=torch.device("cpu"),
        observe_gradients=None,
        get_state=lambda: EngineState({}, 0),
    )
    meter, outputs = NormMeter(1, cast(Any, engine)), {}
    meter.begin_step(1)
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda _, inputs, output, n=number: outputs.update({f"blocks.{n}": output})
        )
    tokens_BT = build_sequences(0, 0, 2).tokens_BT
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[1, -4:] = PADDING
    # Two places of three are used in the first row, one in the second.
    predicted_BP = torch.tensor([[5, 2, -1], [7, -1, -1]])
    model.train()(tokens_BT, documents_BT=documents_BT, predicted_BP=predicted_BP)
    measured = meter.end_step()
    assert measured is not None
    is_real_BT = documents_BT >= 0
    for layer, output in outputs.items():
        assert output.shape[1] == LENGTH + 3
        expected = output[:, :LENGTH][is_real_BT].square().mean().sqrt()
        assert measured["activation"][layer] == pytest.approx(float(expected.detach()), rel=1e-6)
