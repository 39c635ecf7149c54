"""Muon under every engine, with and without QK-clip, against one process with whole matrices, in
fp32.
"""

from typing import Any

import pytest
import torch

from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import MuonConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.engine.accelerate_engine import AccelerateEngine
from llmsys.engine.deepspeed_engine import DeepSpeedEngine
from llmsys.engine.engine import Engine
from llmsys.engine.logit_clip import LogitClip
from llmsys.engine.torch_engine import TorchEngine
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.build_optimizer import MOMENTS, build_optimizer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.parity_runs import (
    STEPS,
    compute_mean_loss,
    gather_full_state,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import LENGTH, SEQUENCES, build_sequences, build_tiny_config

RATE = 1e-2
MUON = MuonConfig(learning_rate=RATE, embedding_lr_multiplier=2.0, max_grad_norm=0)
LAYOUTS = {
    "replicate=2 shard=2": ParallelLayout(replicate=2),
    "expert=4": ParallelLayout(expert=4),
    "tensor=2": ParallelLayout(tensor=2),
    "accelerate": ParallelLayout(replicate=4),
    "zero1 expert=2": ParallelLayout(expert=2),
    "zero3": ParallelLayout(),
    "clip": ParallelLayout(),
    "neurons": ParallelLayout(),
    "neurons replicate=2 expert=2": ParallelLayout(expert=2, replicate=2),
    "neurons tensor=2": ParallelLayout(tensor=2),
    "clip tensor=2 expert=2": ParallelLayout(tensor=2, expert=2),
}
# Between the largest logits of the heads of the tiny model, which are 0.035 to 0.08: some are
# clipped, and not all.
LIMIT = 0.05


NORMUON = MUON.model_copy(update={"neuron_beta": 0.9, "orthogonalization": "polar_express"})


def plain(muon: MuonConfig, limit: float | None = None) -> dict[str, Any]:
    model = Transformer(build_tiny_config())
    initialize_parameters(model, seed=7)
    clip = None if limit is None else LogitClip(model, limit)
    named = dict(model.named_parameters())
    optimizer = build_optimizer(named, muon, compute_dtype=torch.float32)
    for step in range(STEPS):
        compute_mean_loss(model, build_sequences(step, 0, SEQUENCES, ignored=LENGTH)).backward()
        for group in optimizer.param_groups:
            group["lr"] = RATE * group["rate_scale"]
        optimizer.step()
        if clip is not None:
            clip.finish_step(applied=True)
        optimizer.zero_grad()
        update_expert_balance(model)
    state = {f"parameter/{name}": parameter.detach().numpy() for name, parameter in named.items()}
    for name, parameter in named.items():
        kept = optimizer.state[parameter]
        state |= {
            f"{ours}/{name}": kept[theirs].numpy()
            for ours, theirs in MOMENTS.items()
            if theirs in kept
        }
    return state


def build(label: str, layout: ParallelLayout) -> Engine:
    with torch.device("meta"):
        model = Transformer(build_tiny_config())
    settings: dict[str, Any] = {
        "meshes": build_device_meshes(layout, torch.device("cpu")),
        "optimizer": (NORMUON if "neurons" in label else MUON).model_copy(
            update={"max_attention_logit": LIMIT if "clip" in label else None}
        ),
        "loss": build_training_loss(LossConfig()),
        "compute_dtype": torch.float32, "seed": 7, "device": torch.device("cpu"),
    }  # fmt: skip
    if "accelerate" in label:
        return AccelerateEngine(model, **settings)
    if "zero" not in label:
        return TorchEngine(model, **settings)
    stage: Any = int(label[4])
    return DeepSpeedEngine(model, zero_stage=stage, **settings)


def split(rank: int) -> dict[str, dict[str, Any]]:
    states = {}
    for label, layout in LAYOUTS.items():
        fitted = layout.resolve(4, build_tiny_config())
        engine = build(label, fitted)
        for step in range(STEPS):
            engine.train_step(
                select_rank_batches(step, fitted.get_data_rank(rank), fitted.data_parallel_size, 1),
                RATE,
            )
            update_expert_balance(engine.module)
        states[label] = gather_full_state(engine)
    return states


@pytest.mark.distributed
def test_muon_takes_the_same_steps_in_every_layout() -> None:
    oracles = {"": plain(MUON), "clip": plain(MUON, LIMIT), "neurons": plain(NORMUON)}
    states = run_ranks(split, 4)[0]
    for label, state in states.items():
        oracle = oracles[label.split()[0] if label.split()[0] in oracles else ""]
        assert {name for name in state if not name.startswith("buffer/")} == oracle.keys(), label
        for name, value in oracle.items():
            apart = abs(state[name] - value).max()
            assert apart < 1e-4 * max(1.0, abs(value).max()), f"{label}: {name} differs by {apart}"
    clipped = "parameter/blocks.0.attention.k_proj.weight"
    assert abs(oracles["clip"][clipped] - oracles[""][clipped]).max() > 1e-3
    assert any(name.startswith("second_moment/embed") for name in oracles[""])
    assert not any(
        name.startswith("second_moment/") and "_proj" in name
        for name in oracles[""]
        if "bias" not in name
    )
