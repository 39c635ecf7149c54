"""flex_attention gives what plain operations give with a table: every mask, bias and cap, output
and gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from llmsys.model.attention_mask import (
    AttentionMask,
    build_cross_attention_mask,
    build_self_attention_mask,
)
from llmsys.model.embedding import compute_alibi_bias, compute_alibi_slopes
from llmsys.model.flex_attention import (
    AlibiBias,
    DistanceBias,
    FlexMask,
    ScoreBias,
    build_flex_mask,
    call_flex_attention,
)
from llmsys.model.key_ranges import KeyRanges, build_cross_ranges, build_self_ranges
from llmsys.model.scaled_dot_product import compute_attention, compute_eager_attention
from tests.helpers.tiny_model import compute_relative_error

ROWS, LENGTH, HEADS, GROUPS, WIDTH = 2, 160, 4, 2, 16  # a whole and a cut block of 128
LARGEST = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _draw_documents(length: int = LENGTH) -> Tensor:
    cuts_BT = torch.rand(ROWS, length, generator=torch.Generator().manual_seed(1)) < 6 / length
    cuts_BT[:, 0] = False
    documents_BT = cuts_BT.cumsum(1)
    documents_BT[1, -9:] = -1
    return documents_BT


DOCUMENTS = _draw_documents()
PREFIX_B = torch.tensor([50, 131])
PADDING_B = torch.tensor([0, 7])
PLACES = torch.arange(LENGTH)


@dataclass(frozen=True)
class Case:
    """A mask in both forms, and what scores get."""

    ranges: KeyRanges
    table: AttentionMask
    softcap: float | None = None
    sinks: bool = False
    start: int = 0
    bias: str = ""
    key_width: int = WIDTH
    groups: int = GROUPS


def _build_case(
    *,
    length: int = LENGTH,
    start: int = 0,
    rules: dict[str, object] | None = None,
    **settings: object,
) -> Case:
    rules = {"causal": True, **(rules or {})}
    ranges = build_self_ranges(ROWS, length, start=start, **rules)  # type: ignore[arg-type]
    return Case(
        ranges,
        build_self_attention_mask(length, start=start, **rules),  # type: ignore[arg-type]
        start=start,
        **settings,  # type: ignore[arg-type]
    )


PACKED: dict[str, object] = {"documents_BT": DOCUMENTS}
SOURCES = DOCUMENTS[:, :40].clone()
CASES = {
    "causal": _build_case(),
    "documents": _build_case(rules=PACKED),
    "documents, window": _build_case(rules=PACKED | {"window": 20}),
    "window": _build_case(rules={"window": 20}),
    "both ways": _build_case(rules={"causal": False}),
    "documents both ways": _build_case(rules=PACKED | {"causal": False}),
    "window both ways": _build_case(rules=PACKED | {"causal": False, "window": 20}),
    "prefix": Case(
        build_self_ranges(ROWS, LENGTH, causal=True, prefix_B=PREFIX_B),
        AttentionMask(
            visible_B1TS=((PLACES[:, None] >= PLACES) | (PREFIX_B[:, None, None] > PLACES))[:, None]
        ),
    ),
    "soft cap": _build_case(rules=PACKED, softcap=2.0),
    "alibi": _build_case(rules=PACKED, bias="alibi"),
    "trained bias": _build_case(rules=PACKED, bias="trained"),
    "trained bias both ways, soft cap": _build_case(
        rules={"causal": False}, bias="trained", softcap=2.0
    ),
    "sinks": _build_case(rules=PACKED | {"window": 20}, sinks=True),
    "sinks, soft cap, alibi": _build_case(sinks=True, softcap=2.0, bias="alibi"),
    "wide keys (MLA)": _build_case(rules=PACKED, key_width=24, groups=HEADS),
    "wide keys of one head (MLA absorbed)": _build_case(
        start=100, length=20, key_width=24, groups=1
    ),
    "cache": _build_case(start=100, length=20, bias="alibi"),
    "cache, window": _build_case(start=100, length=20, rules={"window": 30}, bias="trained"),
    "cache, padded": _build_case(start=3, length=20, rules={"padding_B": PADDING_B}),
    "one token": _build_case(start=140, length=1, bias="trained"),
    "source": Case(
        build_cross_ranges(DOCUMENTS, SOURCES, ROWS, LENGTH, 40),
        build_cross_attention_mask(DOCUMENTS, SOURCES, LENGTH, 40),
    ),
    "padded source": Case(
        build_cross_ranges(None, (SOURCES > 1).long() - 1, ROWS, LENGTH, 40),
        build_cross_attention_mask(None, (SOURCES > 1).long() - 1, LENGTH, 40),
    ),
}


def _add_bias(case: Case, table_HR: Tensor) -> tuple[ScoreBias | None, AttentionMask]:
    """Return the bias of a case by distance, and its table with the bias of every pair."""
    queries_T, keys_S = (
        torch.arange(case.start, case.ranges.num_keys),
        torch.arange(case.ranges.num_keys),
    )
    if case.bias == "alibi":
        slopes_H = compute_alibi_slopes(HEADS)
        return AlibiBias(slopes_H, case.start), case.table.add_bias(
            compute_alibi_bias(slopes_H, queries_T, keys_S)
        )
    if case.bias == "trained":
        columns_TS = keys_S - queries_T[:, None] + case.ranges.num_keys - 1
        return DistanceBias(table_HR, case.start), case.table.add_bias(table_HR[:, columns_TS])
    return None, case.table


def _compute_both(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradients of flex_attention, and those of plain operations in float32."""
    generator = torch.Generator().manual_seed(0)
    length, keys = case.ranges.first_BT.shape[1], case.ranges.num_keys

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    q, k, v = (
        draw(ROWS, length, HEADS, case.key_width),
        *(draw(ROWS, keys, case.groups, w) for w in (case.key_width, WIDTH)),
    )
    sinks_H = torch.randn(HEADS, generator=generator).requires_grad_()
    table_HR = torch.randn(HEADS, 2 * keys - 1, generator=generator).requires_grad_()
    inputs = [q, k, v] + [sinks_H] * case.sinks + [table_HR] * (case.bias == "trained")
    bias, table = _add_bias(case, table_HR)
    extra = {"scale": 0.3, "softcap": case.softcap, "sinks_H": sinks_H if case.sinks else None}
    ours = compute_attention(q, k, v, build_flex_mask(case.ranges, bias), **extra)  # type: ignore[arg-type]
    plain = compute_eager_attention(q.float(), k.float(), v.float(), table, **extra)  # type: ignore[arg-type]
    dout = torch.randn(plain.shape, generator=generator)
    assert ours.dtype == dtype
    return (
        [ours, *torch.autograd.grad(ours, inputs, dout.to(dtype))],
        [plain, *torch.autograd.grad(plain, inputs, dout)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_flex_attention_equals_plain_operations_with_a_table(
    case: Case, dtype: torch.dtype
) -> None:
    ours, plain = _compute_both(case, dtype)
    errors = [compute_relative_error(a, b) for a, b in zip(ours, plain, strict=True)]
    assert max(errors) < LARGEST[dtype], errors


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranges_hold_the_keys_of_the_table(case: Case) -> None:
    ranges = case.ranges
    keys_S = torch.arange(ranges.num_keys)
    inside_BTS = (keys_S >= ranges.first_BT[..., None]) & (keys_S <= ranges.last_BT[..., None])
    visible = case.table.visible_B1TS
    if visible is None:
        visible = torch.ones(1, 1, *inside_BTS.shape[1:], dtype=torch.bool)
        visible = visible.tril() if case.table.causal else visible
    assert torch.equal(inside_BTS, visible[:, 0].expand_as(inside_BTS))


@pytest.mark.parametrize(
    "name", ["causal", "documents", "documents, window", "window both ways", "prefix", "cache"]
)
def test_blocks_are_those_that_torch_finds_in_a_table(name: str) -> None:
    ranges = CASES[name].ranges
    ours = build_flex_mask(ranges).block_mask
    shape = ROWS, None, ranges.first_BT.shape[1], ranges.num_keys
    theirs = create_block_mask(ours.mask_mod, *shape, device="cpu", BLOCK_SIZE=128)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for field_name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, field_name), getattr(theirs, field_name)), field_name


@pytest.fixture
def compile_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, Tensor]]:
    """torch's public function compiled, with the dense reference instead of Triton's
    kernels.
    """
    # refuses gradients on CPUs
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    return torch.compile(call_flex_attention, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "name", ["documents, window", "soft cap", "alibi", "trained bias", "sinks", "source"]
)
def test_the_compiled_function_gives_the_same_gradients(
    name: str, compile_on_cpu: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsys.model.flex_attention._run_flex", compile_on_cpu)
    ours, plain = _compute_both(CASES[name], torch.float32)
    assert max(compute_relative_error(a, b) for a, b in zip(ours, plain, strict=True)) < 1e-5


def test_other_documents_do_not_compile_again(
    compile_on_cpu: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    q = torch.randn(ROWS, HEADS, LENGTH, WIDTH)
    k = torch.randn(ROWS, GROUPS, LENGTH, WIDTH)
    counter = torch._dynamo.utils.counters["stats"]
    frames = []
    for documents_BT, window in [(DOCUMENTS, None), (DOCUMENTS.flip(0), None), (DOCUMENTS * 0, 20)]:
        ranges = build_self_ranges(
            ROWS, LENGTH, causal=True, window=window, documents_BT=documents_BT
        )
        compile_on_cpu(q, k, k, build_flex_mask(ranges), 0.3, None)
        frames.append(counter["unique_graphs"])
    assert frames[0] == frames[-1]


def test_fake_tensors_have_the_shapes_of_real_ones_and_no_scores() -> None:
    case = CASES["trained bias"]
    (ours, *gradients), _ = _compute_both(case, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q = torch.empty(ROWS, LENGTH, HEADS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.empty(ROWS, LENGTH, GROUPS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        table_HR = torch.empty(HEADS, 2 * LENGTH - 1, requires_grad=True)
        first_BT, last_BT = (
            mode.from_tensor(x) for x in (case.ranges.first_BT, case.ranges.last_BT)
        )
        ranges = KeyRanges(first_BT, last_BT, LENGTH)
        mask: FlexMask = build_flex_mask(ranges, DistanceBias(table_HR, 0))
        out = compute_attention(q, k, v, mask)
        fake = torch.autograd.grad(out, [q, k, v, table_HR], torch.empty_like(out))
    assert (out.shape, out.stride(), out.dtype) == (ours.shape, ours.stride(), ours.dtype)
    for a, b in zip(fake, gradients, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
