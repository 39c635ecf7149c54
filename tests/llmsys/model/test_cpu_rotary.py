"""Rotation by pieces agrees with the plain form and with float64, and is used for bfloat16 on
the CPU only.
"""

import pytest
import torch

from llmsys.doctor.rounding import UNIT_ROUNDOFFS
from llmsys.model import cpu_kernels
from llmsys.model.rotary_embedding import RotaryCosSin
from tests.helpers.tiny_model import compute_relative_error


def tables(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unrelated values: nothing may rest on the table being that of a rotation."""
    generator = torch.Generator().manual_seed(width)
    cos, sin = (torch.randn(length, 1, width, generator=generator) for _ in range(2))
    return cos, sin


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 7, 3, 8), (0, 4, 2, 8)], ids=str)
@pytest.mark.parametrize("positions_of_a_piece", [1, 3, 1000])
def test_pieces_are_as_close_to_exact_as_the_plain_form(
    shape: tuple[int, ...], positions_of_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "ELEMENTS", positions_of_a_piece * shape[2] * shape[3])
    generator = torch.Generator().manual_seed(0)
    x, out_gradient = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    cos, sin = tables(shape[1], shape[3])
    x.requires_grad_()
    exact = RotaryCosSin(cos.double(), sin.double())(x.double())
    usual = (x * cos + x.roll(shape[-1] // 2, dims=-1) * sin).bfloat16()
    ours = cpu_kernels.rotate_halves(x, cos, sin)
    results = [
        [y, *torch.autograd.grad(y, x, out_gradient.to(y.dtype))] for y in (exact, usual, ours)
    ]
    for true, other, value in zip(*results, strict=True):
        assert value.shape == true.shape
        assert value.dtype == torch.bfloat16
        # What is rounded once is off by at most one unit roundoff.
        one_rounding = UNIT_ROUNDOFFS[torch.bfloat16]
        usual_error = compute_relative_error(other, true)
        assert compute_relative_error(value, true) <= max(1.1 * usual_error, one_rounding)


def test_pieces_are_used_for_bfloat16_halves_with_one_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[torch.dtype] = []
    monkeypatch.setattr(cpu_kernels, "rotate_halves", lambda x, cos, sin: used.append(x.dtype) or x)
    cos, sin = tables(4, 8)
    x = torch.ones(2, 4, 3, 8)
    RotaryCosSin(cos, sin)(x)
    RotaryCosSin(cos, sin, "neighbours")(x.bfloat16())
    RotaryCosSin(cos[None].expand(2, -1, -1, -1), sin[None].expand(2, -1, -1, -1))(x.bfloat16())
    assert not used
    RotaryCosSin(cos, sin)(x.bfloat16())
    assert used == [torch.bfloat16]
