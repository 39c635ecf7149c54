"""The kernel of the loss gives what plain operations give, by Triton's interpreter on the CPU."""

import importlib.util

import pytest
import torch

from llmsys.data.batch import IGNORED
from llmsys.train.cross_entropy import compute_token_losses

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: CPU wheels of torch do not bring it",
)


@needs_triton
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_interpreted_kernel_equals_plain_operations(
    smoothing: float, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from llmsys.train import cross_entropy_kernel

    monkeypatch.setattr(cross_entropy_kernel, "BLOCK", 64)
    generator, classes, z_weight = torch.Generator().manual_seed(0), 150, 1e-2
    # A view with rows farther apart than their length.
    logits_NV = (9 * torch.randn(20, classes + 7, generator=generator))[:, :classes]
    targets_N = torch.randint(0, classes, (20,), generator=generator)
    targets_N[3], targets_N[4] = IGNORED, classes - 1
    wanted_gradient = torch.empty_like(logits_NV)
    wanted = compute_token_losses(logits_NV, targets_N, smoothing, z_weight, wanted_gradient)
    gradient = logits_NV if in_place else torch.full_like(logits_NV, torch.nan)
    other = smoothing / (classes - 1)
    losses = cross_entropy_kernel.run_token_losses(
        logits_NV, targets_N, other, 1 - smoothing - other, z_weight, IGNORED, gradient
    )
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(gradient, wanted_gradient)
    assert losses[3] == 0
    assert not gradient[3].any()
