"""Attention from chunked matrix products agrees with the kernel and with float64, and is used
where it should be.
"""

import pytest
import torch
import torch.nn.functional as F

from llmsys.doctor.rounding import UNIT_ROUNDOFFS
from llmsys.model import cpu_attention
from llmsys.model.attention_mask import AttentionMask, build_self_attention_mask
from llmsys.model.scaled_dot_product import compute_attention
from tests.helpers.tiny_model import compute_relative_error

# Lengths around a chunk of 128, and heads that share keys in every way.
UNIT = UNIT_ROUNDOFFS[torch.bfloat16]
SHAPES = [
    (1, 1, 2, 2, 8),
    (2, 127, 4, 2, 16),
    (1, 128, 2, 1, 8),
    (2, 300, 6, 3, 8),
    (1, 513, 1, 1, 32),
]


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool = True,
) -> torch.Tensor:
    shared_by = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(shared_by, dim=1) for x in (k, v))
    everything = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = mask if mask is not None else everything.tril() if causal else everything
    scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _mask(documents_BT: torch.Tensor) -> torch.Tensor | None:
    return build_self_attention_mask(
        documents_BT.shape[1], causal=True, documents_BT=documents_BT
    ).visible_B1TS


def make(
    shape: tuple[int, ...], documents: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    rows, length, heads, groups, width = shape
    generator = torch.Generator().manual_seed(length)
    inputs = [
        torch.randn(rows, length, n, width, generator=generator).bfloat16().requires_grad_()
        for n in (heads, groups, groups)
    ]
    numbers = (torch.rand(rows, length, generator=generator) < 0.03).cumsum(1)
    out_gradient = torch.randn(rows, length, heads, width, generator=generator).bfloat16()
    return inputs, _mask(numbers) if documents else None, out_gradient


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_as_close_to_exact_as_the_kernel(
    shape: tuple[int, ...], documents: bool
) -> None:
    inputs, mask, out_gradient = make(shape, documents)
    expected = exact(*inputs, mask)  # type: ignore[arg-type, call-arg]
    truth = [expected, *torch.autograd.grad(expected, inputs, out_gradient.double())]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    kernel = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    kernel = kernel.transpose(1, 2)
    usual = [kernel, *torch.autograd.grad(kernel, inputs, out_gradient)]
    y = cpu_attention.compute_chunked_attention(*inputs, mask, causal=True)  # type: ignore[arg-type]
    ours = [y, *torch.autograd.grad(y, inputs, out_gradient)]
    for value, other, true in zip(ours, usual, truth, strict=True):
        assert value.shape == true.shape
        assert compute_relative_error(value, true) < max(
            3 * compute_relative_error(other, true), 2 * UNIT
        )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (7, 300), (300, 7), (130, 130)])
def test_a_source_is_seen_whole_but_for_its_padding(queries: int, keys: int, padded: bool) -> None:
    (q, _, _), _, _ = make((3, queries, 4, 2, 8), documents=False)
    (_, k, v), _, _ = make((3, keys, 4, 2, 8), documents=False)
    lengths = torch.tensor([keys, keys - 2, 1])
    mask = (
        (torch.arange(keys) < lengths[:, None])[:, None, None].expand(3, 1, queries, keys)
        if padded
        else None
    )
    out_gradient = torch.randn(q.shape).bfloat16()
    expected = exact(q, k, v, mask, causal=False)
    y = cpu_attention.compute_chunked_attention(q, k, v, mask, causal=False)
    truth = [expected, *torch.autograd.grad(expected, (q, k, v), out_gradient.double())]
    for value, true in zip(
        [y, *torch.autograd.grad(y, (q, k, v), out_gradient)], truth, strict=True
    ):
        # Scores, weights and sums are rounded, each by half a unit on average.
        assert compute_relative_error(value, true) < 3 * UNIT


def test_chunks_are_used_for_bfloat16_without_cache_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[torch.Size] = []

    def spy(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool,
    ) -> torch.Tensor:
        used.append(q.shape)
        return q

    monkeypatch.setattr(cpu_attention, "compute_chunked_attention", spy)
    (q, k, v), _, _ = make((1, 16, 2, 2, 8), documents=False)
    causal = AttentionMask(causal=True)
    compute_attention(q, k, v, causal)
    compute_attention(q, k, v, causal, scale=8**-0.5)
    compute_attention(q, k, v, build_self_attention_mask(16, causal=True, window=3))
    compute_attention(q, k, v, AttentionMask())
    compute_attention(q, k[:, :3], v[:, :3], AttentionMask())
    assert used == [q.shape] * 5
    compute_attention(q.float(), k.float(), v.float(), causal)
    compute_attention(
        q[:, -1:], k, v, AttentionMask(visible_B1TS=torch.ones(1, 1, 1, 16, dtype=torch.bool))
    )
    compute_attention(q, k, v, causal.add_bias(torch.zeros(2, 16, 16)))
    compute_attention(q, k, v, causal, scale=1.0)
    compute_attention(q, k, v, causal, softcap=5.0)
    compute_attention(q, k, v, causal, sinks_H=torch.zeros(2))
    compute_attention(q, k, v, causal, dropout=0.1)
    compute_attention(q, k, v[..., :4], causal)
    assert used == [q.shape] * 5
