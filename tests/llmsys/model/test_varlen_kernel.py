"""The kernels for wide keys give what plain operations give, by Triton's interpreter on the CPU."""

import importlib.util
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llmsys.kernels.key_split import can_split_keys, split_width

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: CPU wheels of torch do not bring it",
)


def test_keys_are_split_into_powers_of_two_that_tensor_cores_take() -> None:
    assert [split_width(width) for width in (192, 128, 48)] == [(128, 64), (128, 0), (32, 16)]
    assert can_split_keys(192, 128)
    assert can_split_keys(128, 64)
    for widths in ((128, 128), (200, 128), (136, 64), (192, 96), (24, 16), (384, 256)):
        assert not can_split_keys(*widths), widths


def _attend(q: Tensor, k: Tensor, v: Tensor, borders: list[int], causal: bool) -> Tensor:
    outputs = []
    for begin, end in pairwise(borders):
        scores = torch.einsum("thk,shk->hts", q[begin:end], k[begin:end]) * 0.2
        hidden = torch.ones(end - begin, end - begin).triu(1).bool() & causal
        outputs.append(
            torch.einsum(
                "hts,shk->thk", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[begin:end]
            )
        )
    return torch.cat(outputs)


@needs_triton
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("widths", [(48, 32), (64, 32)])
def test_the_interpreted_kernels_equal_plain_operations(
    widths: tuple[int, int], causal: bool, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from llmsys.model.varlen_kernel import run_backward, run_forward

    # Borders inside of tiles, a document of one token, and one of none.
    borders, generator = [0, 5, 140, 141, 141, 210], torch.Generator().manual_seed(0)
    q = torch.randn(210, 2, widths[0], generator=generator)
    keys_values = torch.randn(210, 2, sum(widths), generator=generator)
    k, v = keys_values.split(list(widths), dim=-1)
    dout = torch.randn(210, 2, widths[1], generator=generator)
    cu_lengths = torch.tensor(borders, dtype=torch.int32)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(is_deterministic)
        out, lse_HP = run_forward(q, k, v, cu_lengths, 256, causal, 0.2)
        gradients = run_backward(dout, q, k, v, out, lse_HP, cu_lengths, 256, causal, 0.2)
    finally:
        torch.use_deterministic_algorithms(before)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = _attend(leaves[0], leaves[1], leaves[2], borders, causal)
    for ours, plain in zip(
        (out, *gradients),
        (wanted, *torch.autograd.grad(wanted, leaves, dout.double())),
        strict=True,
    ):
        assert float((ours.double() - plain).norm() / plain.norm()) < 1e-6
