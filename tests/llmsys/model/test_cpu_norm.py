"""RMSNorm by pieces agrees with torch's own and with float64, and is used for bfloat16 on the
CPU only.
"""

import pytest
import torch
import torch.nn.functional as F

from llmsys.doctor.rounding import UNIT_ROUNDOFFS
from llmsys.model import cpu_kernels
from llmsys.model.normalization import RMSNorm
from tests.helpers.tiny_model import compute_relative_error

EPS = 1e-5


@pytest.mark.parametrize("shape", [(1, 8), (3, 7, 16), (2, 5, 3, 24), (0, 8)], ids=str)
@pytest.mark.parametrize("rows_of_a_piece", [1, 4, 1000])
def test_pieces_are_as_close_to_exact_as_torch(
    shape: tuple[int, ...], rows_of_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "ELEMENTS", rows_of_a_piece * shape[-1])
    generator = torch.Generator().manual_seed(0)
    x, out_gradient = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    leaves = [
        x.requires_grad_(),
        torch.randn(shape[-1], generator=generator).bfloat16().requires_grad_(),
    ]
    exact = F.rms_norm(leaves[0].double(), shape[-1:], leaves[1].double(), EPS)
    usual, ours = (
        F.rms_norm(leaves[0], shape[-1:], leaves[1], EPS),
        cpu_kernels.compute_rms_norm(leaves[0], leaves[1], EPS),
    )
    results = [
        [y, *torch.autograd.grad(y, leaves, out_gradient.to(y.dtype))] for y in (exact, usual, ours)
    ]
    for true, other, value in zip(*results, strict=True):
        assert value.shape == true.shape
        assert value.dtype == torch.bfloat16
        # What is rounded once is off by at most one unit roundoff.
        one_rounding = UNIT_ROUNDOFFS[torch.bfloat16]
        usual_error = compute_relative_error(other, true)
        assert compute_relative_error(value, true) <= max(1.1 * usual_error, one_rounding)


def test_rows_may_be_strided_and_the_gradient_expanded() -> None:
    x = torch.randn(4, 3, 8).bfloat16().transpose(0, 1).requires_grad_()
    weight = torch.ones(8).bfloat16()
    plain = torch.autograd.grad(F.rms_norm(x, (8,), weight, EPS).sum(), x)[0]
    assert (
        compute_relative_error(
            torch.autograd.grad(cpu_kernels.compute_rms_norm(x, weight, EPS).sum(), x)[0], plain
        )
        < 1e-2
    )


def test_pieces_are_used_for_bfloat16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.dtype] = []
    monkeypatch.setattr(
        cpu_kernels, "compute_rms_norm", lambda x, weight, eps: used.append(x.dtype) or x
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        RMSNorm(8, EPS).to(dtype)(torch.ones(2, 8, dtype=dtype))
    RMSNorm(8, EPS)(torch.ones(2, 8, dtype=torch.bfloat16))
    assert used == [torch.bfloat16]
