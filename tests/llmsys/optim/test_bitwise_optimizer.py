"""AdamW by exact steps: the algorithm of torch's, and the same bits for an element wherever its
tensor is split.
"""

import random

import torch
from torch import nn

from llmsys.config.optimizer import AdamWConfig
from llmsys.optim.bitwise_optimizer import BitwiseOptimizer
from llmsys.optim.lr_schedule import LearningRate

CONFIG = AdamWConfig(learning_rate=1e-2, weight_decay=0.1, embedding_lr_multiplier=3.0)
SHAPES = {"embed.weight": (11, 7), "blocks.0.norm.weight": (13,), "blocks.0.up_proj.weight": (9, 5)}


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def test_steps_are_those_of_torchs_own() -> None:
    torch.manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    twins = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    groups = [
        {"params": [twins["embed.weight"]], "lr": 3e-2, "weight_decay": 0.1},
        {"params": [twins["blocks.0.norm.weight"]], "lr": 1e-2, "weight_decay": 0.0},
        {"params": [twins["blocks.0.up_proj.weight"]], "lr": 1e-2, "weight_decay": 0.1},
    ]
    ours, theirs = (
        BitwiseOptimizer(named, CONFIG),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8),
    )
    for step in range(5):
        ours.step(gradients(step), LearningRate(1e-2, 0.5 if step == 4 else 1.0), 0.5)
        for group, whole in zip(groups, (0.1, 0.0, 0.1), strict=True):
            group["weight_decay"] = whole * (0.5 if step == 4 else 1.0)
        for twin, gradient in zip(twins.values(), gradients(step), strict=True):
            twin.grad = gradient * 0.5
        theirs.step()
    for name, twin in twins.items():
        torch.testing.assert_close(named[name], twin, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            ours.moments["second_moment"][name],
            theirs.state[twin]["exp_avg_sq"],
            rtol=1e-5,
            atol=1e-9,
        )


def test_an_elements_bits_do_not_depend_on_where_its_tensor_is_split() -> None:
    choose = random.Random(0)
    for trial in range(100):
        size = choose.randint(1, 300)
        first = choose.randint(0, size - 1)
        mine = slice(first, choose.randint(first + 1, size))
        start, gradient = torch.randn(2, size, generator=torch.Generator().manual_seed(trial))
        whole, piece = nn.Parameter(start.clone()), nn.Parameter(start[mine].clone())
        for parameter, found in ((whole, gradient), (piece, gradient[mine])):
            optimizer = BitwiseOptimizer({"up_proj.weight": parameter}, CONFIG)
            for _ in range(2):
                optimizer.step([found], 1e-2, 0.3)
        assert torch.equal(whole[mine], piece)
