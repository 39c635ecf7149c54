"""Attention over packed sequences gives what plain operations give with a table, output and
gradients.
"""

import pytest
import torch
from torch import Tensor

from llmsys.errors import DataError
from llmsys.model.attention_mask import build_self_attention_mask
from llmsys.model.document_lengths import build_document_lengths, build_row_lengths
from llmsys.model.scaled_dot_product import compute_attention, compute_eager_attention
from llmsys.model.varlen_attention import VarlenMask, build_varlen_mask
from tests.helpers.pretended_accelerator import pretend_accelerator
from tests.helpers.tiny_model import compute_relative_error

DOCUMENTS = torch.tensor([[4, 4, 4, 5, 5, 9, 9, 9, 9, -1], [0] * 10, list(range(10))])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def _draw_inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 10, 4, 8), (3, 10, 2, 8), (3, 10, 2, 8), (4,), (3, 10, 4, 8)]
    q, k, v, sinks_H, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    return [*(x.to(dtype).requires_grad_() for x in (q, k, v)), sinks_H.requires_grad_()], dout.to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, None), (True, 3), (True, 1), (False, 3)]
)
def test_packed_sequences_equal_plain_operations_with_a_table(
    causal: bool,
    window: int | None,
    documents: bool,
    sinks: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_accelerator(monkeypatch, exact=True)
    (q, k, v, sinks_H), dout = _draw_inputs(dtype)
    numbers = DOCUMENTS if documents else None
    lengths = (
        build_row_lengths(3, 10, q.device) if numbers is None else build_document_lengths(numbers)
    )
    packed = build_varlen_mask(lengths, causal=causal, window=window)
    table = build_self_attention_mask(10, causal=causal, window=window, documents_BT=numbers)
    inputs = [q, k, v, sinks_H] if sinks else [q, k, v]
    ours = compute_attention(q, k, v, packed, scale=0.3, sinks_H=sinks_H if sinks else None)
    plain = compute_eager_attention(q, k, v, table, scale=0.3, sinks_H=sinks_H if sinks else None)
    assert compute_relative_error(ours, plain) < TOLERANCE[dtype]
    for a, b in zip(*(torch.autograd.grad(y, inputs, dout) for y in (ours, plain)), strict=True):
        # With a window of one the gradients of queries and keys are zero.
        assert float((a - b).norm()) < 2 * TOLERANCE[dtype] * max(1.0, float(b.norm()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_keys_wider_than_values_equal_plain_operations(
    sinks: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_accelerator(monkeypatch, exact=True)
    generator = torch.Generator().manual_seed(0)
    keys_values = torch.randn(3, 10, 4, 48 + 32, generator=generator).requires_grad_()
    q = torch.randn(3, 10, 4, 48, generator=generator).requires_grad_()
    sinks_H = torch.randn(4, generator=generator).requires_grad_()
    # values are a view, as those of latent attention are
    k, v = keys_values.split([48, 32], dim=-1)
    packed = build_varlen_mask(build_document_lengths(DOCUMENTS), causal=causal, window=None)
    table = build_self_attention_mask(10, causal=causal, documents_BT=DOCUMENTS)
    given_H = sinks_H if sinks else None
    ours = compute_attention(q, k, v, packed, scale=0.3, sinks_H=given_H)
    plain = compute_eager_attention(q, k, v, table, scale=0.3, sinks_H=given_H)
    assert compute_relative_error(ours, plain) < 1e-5
    inputs = [q, keys_values, sinks_H] if sinks else [q, keys_values]
    for a, b in zip(
        *(torch.autograd.grad(y, inputs, y.detach().cos()) for y in (ours, plain)), strict=True
    ):
        assert compute_relative_error(a, b) < 1e-5


def test_the_gradient_through_the_sink_is_exact_where_the_kernel_ignores_that_of_lse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Multiplying the output by sigmoid(lse - sink) outside of the kernel would lose a part of
    dq and dk.
    """
    pretend_accelerator(monkeypatch, exact=True)
    (q, k, v, sinks_H), dout = _draw_inputs(torch.float32)
    lengths, table = build_row_lengths(3, 10, q.device), build_self_attention_mask(10, causal=True)
    mask = build_varlen_mask(lengths, causal=True, window=None)
    wanted = torch.autograd.grad(
        compute_eager_attention(q, k, v, table, sinks_H=sinks_H), [q, k, v], dout
    )
    ours = torch.autograd.grad(compute_attention(q, k, v, mask, sinks_H=sinks_H), [q, k, v], dout)
    total = 3 * 10
    out, lse_HP, _ = torch.ops.torch_attn._varlen_attn(
        *(x.flatten(0, 1) for x in (q, k, v)),
        *[lengths.cu_lengths] * 2,
        10,
        10,
        True,
        None,
        [-1, 0],
        True,
    )
    naive = out * torch.sigmoid(lse_HP - sinks_H[:, None]).T[..., None]
    lossy = torch.autograd.grad(naive, [q, k, v], dout.reshape(total, 4, 8))
    assert max(compute_relative_error(a, b) for a, b in zip(ours, wanted, strict=True)) < 1e-5
    assert compute_relative_error(lossy[0], wanted[0]) > 0.02
    assert compute_relative_error(lossy[2], wanted[2]) < 1e-5


def test_lengths_are_counted_over_all_rows_and_rounded_up() -> None:
    lengths = build_document_lengths(DOCUMENTS[:2])
    # five documents are eight
    assert lengths.cu_lengths.tolist() == [0, 3, 5, 9, 10, 20, 20, 20, 20]
    assert lengths.cu_lengths.dtype == torch.int32
    assert lengths.max_length == 10
    assert build_document_lengths(DOCUMENTS[:1]).max_length == 4
    assert build_document_lengths(DOCUMENTS[2:]).max_length == 1
    assert build_row_lengths(2, 5, torch.device("cpu")).cu_lengths.tolist() == [0, 5, 10]


def test_a_document_in_two_pieces_is_refused() -> None:
    with pytest.raises(DataError, match=r"document 3 in row 1 of a batch are apart"):
        build_document_lengths(torch.tensor([[3, 3, 0, 0], [3, 0, 0, 3]]))


def test_what_the_kernel_does_not_take_is_refused_for_fake_tensors_too() -> None:
    q = torch.empty(1, 8, 4, 16, dtype=torch.bfloat16, device="meta")
    mask = build_varlen_mask(build_row_lengths(1, 8, q.device), causal=True, window=None)
    wide, odd = q.new_empty(1, 8, 4, 264), q.new_empty(1, 8, 4, 12)
    longs = VarlenMask(mask.lengths.map_tensors(torch.Tensor.long), mask.window)
    assert compute_attention(q, q, q, mask).shape == q.shape
    for inputs, rule, error in [
        ((q.float(), q.float(), q.float()), mask, "takes fp16 or bf16 alone"),
        ((q, q, q[..., :8]), mask, "widths must be equal"),
        ((wide, wide, wide), mask, "heads of 264 channels: at most 256"),
        ((odd, odd, odd), mask, "heads of 12 channels: at most 256, in multiples of 8"),
        ((q, q[:, :, :3], q[:, :, :3]), mask, "query heads that are a multiple"),
        ((q, q, q), longs, "reads int32"),
    ]:
        with pytest.raises(ValueError, match=error):
            compute_attention(*inputs, rule)
    with pytest.raises(ValueError, match=r"VarlenMask with dropout=0.1"):
        compute_attention(q, q, q, mask, dropout=0.1)
