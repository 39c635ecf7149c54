"""Prefetched weights are those of the forward that uses them."""

import re

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from llmsys.config.run import RunConfig
from llmsys.doctor.parity_models import DENSE, LATENT, SEQUENCES
from llmsys.doctor.parity_rows import build_micro_batches
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.fsdp import limit_prefetch_to_stages
from llmsys.parallel.process_group import get_rank
from llmsys.train.build_engine import build_engine
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def list_prefetched(rank: int, stages: int) -> list[str]:
    """Names of the units that the backward of what is outside of blocks prefetches, where the
    blocks belong to this many stages; [] where FSDP chooses.
    """
    config = RunConfig.model_validate(
        {
            "model": DENSE.model,
            "engine": {"kind": "torch", "data_parallel": "fsdp"},
            "layout": {"shard": 1},
            "batch": {"sequence_length": DENSE.length, "sequences": SEQUENCES},
            "train": {"precision": "fp32", "threads_per_process": 1},
        }
    )
    model = build_engine(config, build_device_meshes(config.resolve_layout(1), CPU), CPU).module
    limit_prefetch_to_stages(model, lambda name: sum(map(int, re.findall(r"\d+", name))) % stages)
    states = {
        name: state
        for name, unit in model.named_modules()
        if (state := _get_module_fsdp_state(unit)) is not None
    }
    prefetched = states[""]._states_to_backward_prefetch
    return [name for name, state in states.items() if state in prefetched]


@pytest.mark.distributed
def test_a_rank_with_several_stages_prefetches_none_of_another() -> None:
    assert run_ranks(list_prefetched, 1, 1) == [[]]
    assert run_ranks(list_prefetched, 1, 2) == [[""]]


def train_changed_weights(rank: int, reproducibility: str) -> list[tuple[float, float]]:
    """Loss and norm of a step whose weights were changed by a third, without and with an evaluation
    before the change.
    """
    config = RunConfig.model_validate(
        {
            "model": LATENT.model,
            "layout": {"shard": 2, "expert": 2},
            "batch": {
                "sequence_length": LATENT.length,
                "sequences": SEQUENCES,
                "micro_sequences": 1,
            },
            "train": {
                "precision": "fp32",
                "reproducibility": reproducibility,
                "threads_per_process": 1,
            },
        }
    )
    found = []
    for evaluates in (False, True):
        engine = build_engine(config, build_device_meshes(config.resolve_layout(2), CPU), CPU)
        batches = build_micro_batches(LATENT, 0, rank=0, ranks=1, micro=1, is_bitwise=False)
        if evaluates:
            engine.compute_logits(batches[0])
        for name, tensor in engine.get_state().tensors.items():
            if name.startswith("parameter/"):
                tensor.mul_(4 / 3)
        result = engine.train_step(batches[get_rank() :: 2], 0.0)
        found.append((result.loss, result.gradient_norm))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("reproducibility", ["fast", "bitwise"])
def test_weights_that_an_evaluation_does_not_use_are_not_those_of_the_next_step(
    reproducibility: str,
) -> None:
    assert LATENT.model.multi_token_prediction is not None  # an evaluation does not run it
    for without, after in run_ranks(train_changed_weights, 2, reproducibility):
        assert after == without
