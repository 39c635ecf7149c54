"""What a grown parameter is made from: layers repeat the stack, and copies of an input differ by
their noise.
"""

import pytest
import torch

from llmsys.config.loading.load import load_model_config
from llmsys.train.model_growth import NOISE, find_growth, find_shape_violation, grow_tensor

STORED = {
    f"blocks.{number}.{name}": torch.Size(shape)
    for number in range(3)
    for name, shape in (
        ("attention.q_proj.weight", (8, 4)),
        ("feed_forward.up_proj.weight", (6, 4)),
    )
}


@pytest.mark.parametrize(("layer", "source"), [(0, 0), (2, 2), (3, 0), (4, 1), (5, 2), (7, 1)])
def test_layers_of_a_deeper_model_repeat_the_whole_stack(layer: int, source: int) -> None:
    growth = find_growth(f"blocks.{layer}.attention.q_proj.weight", (8, 4), STORED)
    assert growth is not None
    assert growth.source == f"blocks.{source}.attention.q_proj.weight"


def test_copies_of_an_input_share_its_weight_and_differ_by_noise_that_cancels() -> None:
    growth = find_growth("blocks.1.feed_forward.up_proj.weight", (12, 12), STORED)
    assert growth is not None
    assert (growth.repeats, growth.input_dim) == ((2, 3), 1)
    torch.manual_seed(0)
    stored = torch.randn(6, 4)
    grown = grow_tensor(stored, growth, (0, "name"))
    copies = grown.view(2, 6, 3, 4)
    # An input that has three copies gives what the one input gave.
    for part in copies:
        torch.testing.assert_close(part.sum(1), stored)
    noise = copies - stored[None, :, None] / 3
    assert float(noise.std()) == pytest.approx(NOISE * float(stored.std()) / 3, rel=0.3)
    assert not torch.equal(grow_tensor(stored, growth, (0, "other")), grown)
    assert torch.equal(grow_tensor(stored, growth, (0, "name")), grown)


@pytest.mark.parametrize(
    ("depth", "problem"),
    [
        (8, None),
        (6, "block 5 has attention, and block 1, which it would copy, has linear_attention"),
    ],
)
def test_a_block_copies_only_one_of_its_own_mixer(depth: int, problem: str | None) -> None:
    saved = load_model_config("train/qwen3-next-tiny").model_dump(mode="json")
    assert saved["num_hidden_layers"] == 4
    pattern = [saved["layer_types"][layer % len(saved["layer_types"])] for layer in range(4)]
    types = [*pattern, *(pattern if problem is None else [pattern[0], pattern[-1]])]
    model = load_model_config(
        "train/qwen3-next-tiny",
        [f"model.num_hidden_layers={depth}", f"model.layer_types=[{', '.join(types)}]"],
    )
    found = find_shape_violation(saved, model)
    assert found is None if problem is None else (found or "").startswith(problem)
