"""The tensors between queries, keys and values and what attention gives: by which of its ways it is computed.

The ways are those of `llmsys/model/attend.py`; which one a config takes depends on the device too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmsys.config.attention import MultiHead
from llmsys.config.model import ModelConfig
from llmsys.estimate.kept import Extent, Tensor
from llmsys.estimate.memory import FP32

CHUNKED_UP_TO, CHUNK = 2048, 128  # llmsys/model/cpu_attention.py

Way = Literal["kernel", "chunked", "composed", "plain", "explicit"]
"""kernel: fused, keeps its inputs and a logsumexp; chunked: the CPU's for 16 bits; composed: torch's own fall-back, in
float32; plain: our operations for what no kernel knows; explicit: Megatron's before fused attention, in 16 bits."""


@dataclass(frozen=True)
class Heads:
    """What is mixed: query heads, key-value heads, channels of a key and of a value, and how many keys there are."""

    queries: int
    groups: int
    key: int
    value: int
    keys: int
    causal: bool


def way_of(model: ModelConfig, heads: Heads, extent: Extent, *, own: bool) -> Way:
    """How these heads are mixed; `own`: of a sequence to itself, where positions can be a bias."""
    attention = model.attention if isinstance(model.attention, MultiHead) else MultiHead()
    if extent.system.attention == "explicit":
        return "explicit"
    unknown = attention.logit_softcap is not None or (attention.sinks and own)
    if unknown or (model.dropout.attention > 0 and extent.on_cpu):
        return "plain"
    trained_bias = own and model.position.kind in ("relative_bias", "transformer_xl")
    if extent.on_cpu and (trained_bias or heads.key != heads.value):
        return "composed"
    scale = attention.scale is None or abs(attention.scale * heads.key**0.5 - 1) < 1e-9
    biased = own and model.position.kind == "alibi"
    suits = extent.on_cpu and extent.value == 2 and max(extent.length, heads.keys) <= CHUNKED_UP_TO
    return "chunked" if suits and scale and not biased else "kernel"


def mixing_tensors(model: ModelConfig, heads: Heads, way: Way, extent: Extent) -> Iterator[Tensor]:
    """Copies of queries, keys and values where a way makes its own, scores where it keeps them, and the output."""
    yield from _copies(heads, way, extent)
    if model.position.kind == "transformer_xl":
        yield from _by_distance(heads, extent)
    yield from _scores(model, heads, way, extent)
    fused = way in ("kernel", "chunked", "explicit")
    output = extent.inner(heads.queries * heads.value)
    yield Tensor("attention output", output, "attention" if fused else "pointwise")


def _copies(heads: Heads, way: Way, extent: Extent) -> Iterator[Tensor]:
    share, size = heads.keys / extent.length, FP32 if way == "composed" else extent.value
    keys = heads.groups * heads.key, heads.groups * heads.value
    if way in ("composed", "plain"):
        keys = heads.queries * heads.key, heads.queries * heads.value  # of every query head
    if way in ("composed", "plain", "chunked"):
        yield Tensor("queries as they are multiplied", extent.inner(heads.queries * heads.key, size), "pointwise")
        yield Tensor("keys and values likewise", int(extent.inner(sum(keys), size) * share), "pointwise")
    elif way == "kernel" and repeats(heads, extent):
        yield Tensor("keys and values of every head", int(2 * extent.inner(heads.queries * heads.key) * share), "fused")


def repeats(heads: Heads, extent: Extent) -> bool:
    """Whether keys are copied for every query head: the fused kernel of GPUs that takes a table knows no groups."""
    return extent.table != "none" and not extent.on_cpu and heads.groups != heads.queries


def _scores(model: ModelConfig, heads: Heads, way: Way, extent: Extent) -> Iterator[Tensor]:
    count, keys, dropped = heads.queries, heads.keys, model.dropout.attention > 0
    if way == "kernel":
        yield Tensor("logsumexp", extent.inner(count, FP32), "attention")
    elif way == "chunked":
        share = _computed_share(extent.length) if heads.causal else 1.0
        yield Tensor("probabilities", int(extent.pairs(count, keys=keys) * share), "attention")
    elif way == "explicit":  # Korthikanti 2022, 4.1: softmax 2as, mask as, what is left of it 2as
        yield Tensor("scores, softmax", extent.pairs(count, keys=keys), "pointwise")
    else:
        yield from _plain_scores(model, heads, way, extent)
    if way == "kernel" and extent.table in ("windows", "documents"):  # a table of yes and no becomes numbers
        rows = extent.sequences if extent.table == "documents" else 1
        yield Tensor("table as numbers", rows * extent.length * keys * extent.value, "fused")
    if dropped and way != "kernel":
        mask = extent.value if extent.on_cpu else 1
        yield Tensor("scores, dropout mask", extent.pairs(count, mask, keys=keys), "pointwise")
        yield Tensor("scores, dropped", extent.pairs(count, keys=keys), "pointwise")


def _plain_scores(model: ModelConfig, heads: Heads, way: Way, extent: Extent) -> Iterator[Tensor]:
    """T × S for every head: softmax in float32, and without dropout the weights in 16 bits."""
    attention, count, keys = model.attention, heads.queries, heads.keys
    if way == "plain" and isinstance(attention, MultiHead):
        if attention.logit_softcap is not None:
            yield Tensor("scores, capped", extent.pairs(count, keys=keys), "pointwise")
        keys += bool(attention.sinks)
    yield Tensor("scores, softmax", extent.pairs(count, FP32, keys=keys), "pointwise")
    if way == "plain" and extent.value != FP32 and not model.dropout.attention:
        yield Tensor("scores, weights", extent.pairs(count, keys=heads.keys), "pointwise")


def _by_distance(heads: Heads, extent: Extent) -> Iterator[Tensor]:
    """Transformer-XL: a key for each distance, the queries for it, and scores of 2T − 1 distances."""
    distances = 2 * extent.length - 1
    yield Tensor("keys of distances", int(distances * heads.queries * heads.key * extent.value), "product")
    yield Tensor("queries of distances", extent.inner(heads.queries * heads.key), "pointwise")
    yield Tensor("scores by distance", extent.pairs(heads.queries, keys=distances), "pointwise")
    yield Tensor("which distance", 8 * extent.length**2, "pointwise")


def _computed_share(length: int) -> float:
    """Of T × T scores, those that causal attention by chunks computes: up to the end of each chunk."""
    starts = range(0, length, CHUNK)
    return sum((min(one + CHUNK, length) - one) * min(one + CHUNK, length) for one in starts) / length**2
