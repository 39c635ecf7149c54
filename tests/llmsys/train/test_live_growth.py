"""A batch that grows while it trains: noise scale, doublings and losses of a plain loop in
torch.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.run import RunConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.doctor.toy_dataset import LENGTH, build_toy_config, write_toy_dataset
from llmsys.events import read_latest_events
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import build_parameter_groups
from llmsys.train.build_objective import build_step_batches
from llmsys.train.build_trainer import train_run
from llmsys.train.gradient_noise_scale import DECAY
from llmsys.train.recorded_changes import set_recorded_changes
from tests.reference.noise_scale import PlainGrowth, PlainNoiseScale

RAMP = {"kind": "noise_scale", "start_tokens": 2 * LENGTH, "max_share": 4.0, "min_measurements": 3}


def build_config(folder: Path) -> RunConfig:
    return build_toy_config(
        folder,
        data={"folder": folder / "data"},
        model={"moe": None, "intermediate_size": 48},
        batch={"micro_sequences": 1, "ramp": RAMP, "sequences": 16},
        train={"noise_scale_every_steps": 1, "hang_timeout_seconds": 600},
        schedule={"kind": "constant"},
    )


def compute_mean_gradient(model: Transformer, batches: list[Batch]) -> tuple[float, float, int]:
    """Leave the gradient of the mean loss in the model; return loss, norm and number of targets."""
    model.zero_grad()
    targets = sum(int((batch.targets_BT != IGNORED).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        logits_BTV = model(**batch.to_model_inputs())
        nats = nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum"
        )
        (nats / targets).backward()
        total += float(nats.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return (
        total / targets,
        float(torch.stack([grad.square().sum() for grad in gradients]).sum().sqrt()),
        targets,
    )


def train_plainly(config: RunConfig) -> list[dict[str, Any]]:
    """Loss, noise scale and size of each step, and whether the batch doubles after it."""
    model = Transformer(config.model)
    initialize_parameters(model, config.run.seed)
    named, rule = dict(model.named_parameters()), config.optimizer
    groups = [
        {"params": [named[name] for name in group.names], "weight_decay": group.weight_decay}
        for group in build_parameter_groups(named.items(), rule)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=rule.learning_rate, betas=rule.betas, eps=rule.eps, foreach=False
    )
    noise = PlainNoiseScale(DECAY)
    growth = PlainGrowth(2 * LENGTH, 16 * LENGTH, 4.0, 3)
    doubled, done, step, found = list[int](), 0, 0, list[dict[str, Any]]()
    while done < config.train.tokens:
        # Which rows a step has is judged elsewhere.
        grown = set_recorded_changes(config, {"batch_growth": {"doubled_after_steps": doubled}})
        batches = build_step_batches(grown, 1, 0).get_micro_batches(step)
        _, small_norm, small = compute_mean_gradient(model, batches[: len(batches) // 2])
        loss, large_norm, large = compute_mean_gradient(model, batches)
        noise.add(small_norm, small, large_norm, large)
        nn.utils.clip_grad_norm_(model.parameters(), rule.max_grad_norm)
        optimizer.step()
        done, step, size = done + growth.size, step + 1, growth.size
        tokens = noise.compute_tokens()
        if done < config.train.tokens and growth.measure(tokens):
            doubled.append(step)
        found.append(
            {"loss": loss, "noise_scale_tokens": tokens, "batch_tokens": size, "tokens": done}
        )
    return found


def test_a_batch_grows_as_in_a_plain_loop(tmp_path: Path) -> None:
    write_toy_dataset(tmp_path / "data")
    config = build_config(tmp_path)
    train_run(config, lambda *_: [])
    events = read_latest_events(config.run.folder / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    expected = train_plainly(config)
    assert len(steps) == len(expected)
    for step, plain in zip(steps, expected, strict=True):
        for name, value in plain.items():
            assert step[name] == pytest.approx(value, rel=2e-3), (step["step"], name)
    growths = [event for event in events if event["event"] == "batch_growth"]
    sizes = [plain["batch_tokens"] for plain in expected]
    changes = [number for number, (one, other) in enumerate(pairwise(sizes), 1) if one != other]
    assert [event["step"] for event in growths] == changes
    assert len(changes) >= 2
    ramp = config.batch.ramp
    assert isinstance(ramp, NoiseRampConfig)
    assert growths[-1]["doubled_after_steps"] == changes
