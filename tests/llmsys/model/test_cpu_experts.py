"""Grouped products with rounded numbers of rows are those of each expert alone, in values and
gradients.
"""

import pytest
import torch
from torch import Tensor

from llmsys.model import cpu_kernels

D, F = 24, 40


def one_by_one(x_MD: Tensor, weight_EDF: Tensor, counts: list[int]) -> Tensor:
    parts = x_MD.split(counts)
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EDF, strict=True)])


@pytest.mark.parametrize(
    "counts", [[5, 40, 0, 70, 1], [0, 0, 0], [0, 3], [64, 32], [1, 1, 1, 1], [200, 0], [33, 31, 95]]
)
def test_values_and_gradients_are_those_of_each_expert_alone(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), D, generator=generator)
    weight = torch.randn(len(counts), D, F, generator=generator)
    upstream = torch.randn(sum(counts), F, generator=generator)
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        rows = x.bfloat16().to(dtype).requires_grad_()
        weights = weight.bfloat16().to(dtype).requires_grad_()
        if dtype == torch.float64:
            y = one_by_one(rows, weights, counts)
        else:
            y = cpu_kernels.compute_grouped_mm(
                rows, weights, torch.tensor(counts).cumsum(0).to(torch.int32)
            )
        y.backward(upstream.bfloat16().to(dtype))
        found.append((y, rows.grad, weights.grad))
    for exact, fast in zip(*found, strict=True):
        assert exact is not None
        assert fast is not None
        torch.testing.assert_close(fast.double(), exact, rtol=1e-2, atol=5e-2)


def test_the_operation_is_one_that_torch_can_trace() -> None:
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((40, 16), (3, 16, 8)))
    arguments = (x, weight, torch.tensor([7, 7, 40], dtype=torch.int32))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cpu_kernels.compute_grouped_mm, arguments, test_utils=tests)


def test_every_product_has_a_rounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # oneDNN keeps about 0.6 MiB of code for every shape, and never frees it.
    shapes: list[tuple[int, int, int]] = []
    multiply = torch.mm

    def record(left: Tensor, right: Tensor, **options: Tensor) -> Tensor:
        shapes.append((left.shape[0], left.shape[1], right.shape[1]))
        return multiply(left, right, **options)

    monkeypatch.setattr(torch, "mm", record)
    for counts in ([37, 50], [3, 41], [70, 0], [90, 10, 1]):
        rows = torch.randn(sum(counts), D).bfloat16().requires_grad_()
        weights = torch.randn(len(counts), D, F).bfloat16().requires_grad_()
        ends = torch.tensor(counts).cumsum(0).to(torch.int32)
        cpu_kernels.compute_grouped_mm(rows, weights, ends).sum().backward()
    assert {size for shape in shapes for size in shape if size not in (D, F)} == {32, 64, 96}


def test_code_is_that_of_every_rounded_number_of_rows_up_to_four_times_the_mean() -> None:
    # 4 · 20 rows are three steps of 32; forward and two gradients, up and down
    assert cpu_kernels.estimate_code_bytes(20, (64, 96)) == 3 * 2 * 3 * cpu_kernels.CODE_BYTES
    assert cpu_kernels.estimate_code_bytes(20, (64, 64)) == 3 * 1 * 3 * cpu_kernels.CODE_BYTES
