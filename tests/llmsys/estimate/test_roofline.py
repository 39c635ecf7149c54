"""Kernels of a layer: the operations of a block, below the roof of the device."""

import pytest

from llmsys.config.loading.load import load_model_config
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.flops import count_flops
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.roofline import list_layer_kernels

H100 = load_device_profile("h100-sxm")


@pytest.mark.parametrize("name", ["llama3.1-8b", "mixtral-8x7b", "deepseek-v3", "gemma2-9b"])
def test_kernels_are_those_of_a_block_and_stay_below_the_roof(name: str) -> None:
    model = load_model_config(f"model/{name}")
    kernels = list_layer_kernels(model, H100, 2, 1024)
    for one in kernels:
        roof = min(H100.get_peak_flops("bf16"), one.intensity * H100.memory_bandwidth)
        assert 0 < one.rate < roof, one.name
    matrices = sum(one.flops for one in kernels if "elementwise" not in one.name)
    if name == "llama3.1-8b":
        blocks = model.num_hidden_layers
        head = 2 * model.vocab_size * model.hidden_size * 2048
        assert matrices * blocks == count_flops(model, 1024, 2).forward - head
    if name == "mixtral-8x7b":
        experts = sum(one.flops for one in kernels if "experts" in one.name)
        assert (
            experts
            == 2
            * 2048
            * 2
            * count_parameters(model).by_component["experts"]
            / 8
            / model.num_hidden_layers
        )


def test_tensor_parallelism_divides_a_layer() -> None:
    model = load_model_config("model/llama3.1-8b")
    one, four = (list_layer_kernels(model, H100, 1, 4096, tensor) for tensor in (1, 4))
    ratio = sum(kernel.flops for kernel in one[:8]) / sum(kernel.flops for kernel in four[:8])
    assert ratio == pytest.approx(4)
    assert [kernel.name for kernel in one] == [kernel.name for kernel in four]
