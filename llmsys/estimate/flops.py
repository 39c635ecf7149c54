"""FLOPs of matmuls: visible pairs of attention, recomputed matmuls, and three counting conventions.

A matmul of (m, k) by (k, n) is 2·m·k·n operations; the backward runs two for each one of the
forward. Look-ups, norms, biases, activations and rotations count nothing; router, poolers and heads
count. The recompute policies themselves are in llmsys/parallel/activation_checkpoint.py.

Invariants:
- PyTorch's FlopCounterMode over eager attention counts the same as `full`, to the last operation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from llmsys.config.linear_attention import LinearAttentionConfig
from llmsys.config.long_attention import AttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import Input, ParameterTensor, ScoreShape
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.estimate.model_tensors import is_head_tied, list_model_tensors
from llmsys.estimate.python_blocks import count_feed_forward_products, count_measured_products


def count_visible_pairs(length: int, window: int | None, *, causal: bool) -> int:
    """Pairs within one document of `length` tokens.

    A token sees itself and what came before, with a window at most `window` positions; without
    `causal` the same on both sides, |query − key| < window.
    """
    reach = length if window is None else min(window, length)
    # the first tokens see fewer than the window
    one_side = reach * (reach + 1) // 2 + (length - reach) * reach
    return one_side if causal else 2 * one_side - length


def iter_document_lengths(length: int, documents: Sequence[int]) -> Iterator[int]:
    """Lengths of the documents in one window of `length` tokens.

    `documents` repeats until the window is full, and the last one is cut; without any, the window
    is one document. Raises ValueError for a document without tokens.
    """
    if any(one < 1 for one in documents):
        raise ValueError(
            f"A document length of {min(documents)} tokens is too small. Give lengths of 1 token "
            "or more."
        )
    used = 0
    while used < length:
        for one in documents or (length,):
            cut = min(one, length - used)
            if cut:
                yield cut
            used += cut


Recompute = Literal["none", "selective", "full", "offload"]
Attention = Literal["none", "distances", "self", "all"]


def iter_recomputed_matrices(
    model: ModelConfig, rows: Iterable[ParameterTensor], recompute: Recompute
) -> Iterator[ParameterTensor]:
    """The matrices whose products are computed again: under `block` those of every block but its
    last product.

    torch stops as soon as it has all that backward asks for. After the last product there is a sum
    alone, which asks for nothing, unless a norm, dropout or the weights of experts follow.

    Args:
        model: architecture.
        rows: parameters to choose from.
        recompute: policy of `train.activation_checkpoint`.

    Yields:
        Rows of the matrices.
    """
    if recompute != "full" and not model.residual.is_reversible:
        return
    for row in rows:
        inside = row.layers and "block" in row.name
        if inside and row.input is not None and not _is_last_in_block(model, row):
            yield row


def get_recomputed_attention(model: ModelConfig, recompute: Recompute) -> Attention:
    """Return the matmuls between activations that are recomputed, in layers of `model.attention`.

    Under `selective` those that no fused kernel computes: all where scores are capped, of
    self-attention where there are sinks, of queries and distances in Transformer-XL. Dropout inside
    attention is taken to be fused, as on GPUs.
    """
    if recompute == "full" or model.attention.recomputes_scores or model.residual.is_reversible:
        return "all"
    if recompute in ("none", "offload"):
        return "none"
    scores = _build_score_shape(model)
    if scores.has_softcap:
        return "all"
    return "self" if scores.has_sinks else "distances"


def _is_last_in_block(model: ModelConfig, row: ParameterTensor) -> bool:
    """Return whether a matrix makes the last matmul of its block, which is added to the stream
    as it is.
    """
    # A prediction module has a block like the last one.
    is_further = row.component == "multi_token_prediction"
    layer = model.num_hidden_layers - 1 if is_further else row.layers[0]
    residual = model.get_residual(layer)
    if (
        residual.normalizes_output
        or residual.normalizes_sum
        or residual.is_reversible
        or model.dropout.residual
    ):
        return False
    name = row.name
    if not model.has_feed_forward(layer):
        is_hybrid = model.is_linear_layer(layer) and model.has_attention(layer)
        return name.endswith(".linear_attention.o_proj.weight" if is_hybrid else ".o_proj.weight")
    crossed = model.family == "encoder_decoder" and not name.startswith("encoder.")
    if crossed and residual.is_parallel:
        return name.endswith(".cross_attention.o_proj.weight")
    if model.moe is not None and model.moe.latent_size is not None and ".shared." in name:
        return False  # the sum of the experts is projected behind it
    shared = (
        model.moe is not None
        and not model.moe.shared_gate
        and name.endswith(".shared.down_proj.weight")
    )
    ends = (".feed_forward.down_proj.weight", ".fc2_latent_proj.weight")
    return shared or name.endswith(ends)


Convention = Literal["causal", "full", "hardware"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)


@dataclass(frozen=True)
class FlopsCount:
    """Operations of one batch. `attention` is the part of `forward` in scores and weighted sums; it
    grows with s².

    `tokens` are those of the decoder in an encoder-decoder: the ones that are predicted.
    """

    convention: Convention
    tokens: int
    forward: int
    forward_backward: int
    attention: int

    @property
    def attention_share(self) -> float:
        """Share of attention's scores and weighted sums in the forward pass."""
        return self.attention / self.forward

    @property
    def flops_per_token(self) -> float:
        """Operations of forward and backward for one token, on average over the window."""
        return self.forward_backward / self.tokens


@dataclass(frozen=True)
class _PackedSequence:
    """One sequence: its length in tokens, those of the documents packed into it (empty: one), and
    XLNet's predictions.

    Both streams see as many pairs as one stream that sees everything: what one hides, the other one
    shows.
    """

    length: int
    documents: Sequence[int]
    exact: bool
    predicted: int = 0

    def count_query_key_pairs(self, window: int | None, *, causal: bool) -> int:
        """Pairs of query and key that are counted in one head of self-attention."""
        if not self.exact:
            return (self.length + self.predicted) * self.length
        lengths = iter_document_lengths(self.length, self.documents)
        return sum(count_visible_pairs(one, window, causal=causal) for one in lengths)

    def list_documents(self) -> list[int] | None:
        """Lengths of the documents whose pairs are counted; None: every pair that is computed."""
        return list(iter_document_lengths(self.length, self.documents)) if self.exact else None


def count_flops(
    model: ModelConfig,
    sequence_length: int,
    sequences: int,
    convention: Convention = "causal",
    *,
    target_length: int | None = None,
    documents: Sequence[int] = (),
    recompute: Recompute = "none",
) -> FlopsCount:
    """Count the operations of a batch in one convention.

    `causal` counts the pairs that masks let through: earlier tokens, sliding windows, and within
    the documents of the given lengths, which repeat until a window is full (none given: a window is
    one document, an upper bound). Bidirectional attention sees its whole document, cross attention
    the whole source. `full` counts s² everywhere (PaLM, Chowdhery 2022, appendix B), and in
    Transformer-XL all 2s − 1 distances. `hardware` is `full` and, in `forward_backward`, what
    `recompute` makes the backward pass compute again. Experts count as many visits as the router
    asks for; capacity may drop some. Modules for multi-token prediction count as in training: over
    the whole window, and through the head again where they have a target.

    Args:
        model: architecture.
        sequence_length: tokens of a window; in an encoder-decoder those of the source.
        sequences: windows of the batch.
        convention: causal, full or hardware.
        target_length: tokens of the decoder in an encoder-decoder; None: as the source. XLNet: of
            both streams.
        documents: lengths in tokens of packed documents, repeated until a window is full.
        recompute: policy of `train.activation_checkpoint`; counts under `hardware` only.

    Returns:
        Operations of all windows, forward and backward.
    """
    decodes = model.family == "encoder_decoder"
    length = target_length if decodes and target_length is not None else sequence_length
    predicted = max(0, (target_length or 0) - length) if model.head.kind == "permutation" else 0
    source, target = (
        _PackedSequence(one, documents, convention == "causal", predicted)
        for one in (sequence_length, length)
    )
    attention = sequences * sum(_iter_attention_flops(model, source, target))
    vectors = _count_input_vectors(model, source, target, sequences)
    places = sequences * sum(_iter_logit_positions(model, target.predicted or target.length))
    rows = list_model_tensors(model)
    logits = places * model.vocab_size * model.hidden_size
    own = sequences * count_feed_forward_products(model, length)
    forward = 2 * (_count_weight_multiplications(rows, vectors) + logits + own) + attention
    repeated = 0
    if convention == "hardware":
        repeated = 2 * _count_weight_multiplications(
            iter_recomputed_matrices(model, rows, recompute), vectors
        )
        repeated += 2 * own if recompute == "full" else 0
        repeated += sequences * _count_recomputed_attention_flops(model, source, target, recompute)
    solved = 2 * sequences * _count_backward_products(model, target)
    spared = 2 * sum(
        row.num_elements * row.cut_steps * vectors[row.input]
        for row in rows
        if row.input is not None
    )
    # the backward runs two products for each one of the forward
    return FlopsCount(
        convention,
        sequences * length,
        forward,
        3 * forward - spared + solved + repeated,
        attention,
    )


def list_attention_flops(
    model: ModelConfig, sequence_length: int, sequences: int, documents: Sequence[int] = ()
) -> list[int]:
    """Count the forward operations of self-attention layer by layer, as `causal` counts them.

    Args:
        model: a model of one stack.
        sequence_length: tokens of a window.
        sequences: windows of the batch.
        documents: lengths in tokens of packed documents, repeated until a window is full.

    Returns:
        Operations of scores and weighted sums of each layer, then of each prediction module.
    """
    packed = _PackedSequence(sequence_length, documents, exact=True)
    layers = len([*_iter_attention_layers(model)])
    # Those of distances come first, for all layers, then scores.
    found = [*_iter_self_attention_flops(model, packed)]
    pairs = zip(found[:layers], found[layers:], strict=True)
    return [sequences * (distances + scores) for distances, scores in pairs]


def _count_weight_multiplications(
    rows: Iterable[ParameterTensor], vectors: dict[Input, int]
) -> int:
    return sum(
        row.elements_per_vector * vectors[row.input] for row in rows if row.input is not None
    )


def _count_input_vectors(
    model: ModelConfig, source: _PackedSequence, target: _PackedSequence, sequences: int
) -> dict[Input, int]:
    tokens = sequences * (target.length + target.predicted)
    return {
        "predicted": sequences * (target.predicted or target.length),
        "token": tokens,
        "source": sequences * source.length,
        "sequence": sequences,
        "distance": _count_distances(model, target),  # once for the whole batch
        "encoder_distance": 2 * source.length - 1,
        "visit": 0
        if model.moe is None
        else sequences * model.moe.count_sequence_visits(target.length),
        "patch": 0 if model.patches is None else tokens - sequences * model.patches.num_leading,
    }


def _iter_logit_positions(model: ModelConfig, length: int) -> Iterator[int]:
    """Positions of one sequence that go through the head, beyond what its own matrix among the
    tensors counts.

    A tied head multiplies though it is no separate tensor. Prediction module k goes through the
    head again, at the positions that have a token k places further.
    """
    if is_head_tied(model):
        yield length
    if model.head.has_logits:
        yield from (max(0, length - k) for k in range(1, _get_prediction_depth(model) + 1))


def _iter_attention_flops(
    model: ModelConfig, source: _PackedSequence, target: _PackedSequence
) -> Iterator[int]:
    """Operations of scores and weighted sums for one sequence, layer by layer."""
    yield from _iter_self_attention_flops(model, target)
    if model.family == "encoder_decoder":
        yield from _iter_self_attention_flops(model.encoder_model, source)
        width, layers = model.num_attention_heads * model.head_dim, model.num_hidden_layers
        # A recurrent decoder attends once, after its last layer, or not at all.
        if model.rnn is not None:
            layers = int(model.rnn.score != "none")
        yield layers * 4 * width * target.length * source.length


def _count_recomputed_attention_flops(
    model: ModelConfig, source: _PackedSequence, target: _PackedSequence, recompute: Recompute
) -> int:
    """Operations of scores and weighted sums for one sequence that the backward pass repeats."""
    which = get_recomputed_attention(model, recompute)
    # Layers of linear attention compute what is between projections again, once in the backward
    # pass and once more in that of a block that runs again.
    linear = count_linear_flops(model, target.length)
    linear *= 1 + (recompute in ("full", "selective"))
    if which in ("none", "all"):
        shared = count_linear_flops(model, target.length)
        whole = sum(_iter_attention_flops(model, source, target)) - shared
        return linear + (whole if which == "all" else 0)
    count = _iter_self_attention_flops if which == "self" else _iter_distance_flops
    both = model.family == "encoder_decoder"
    own = sum(count(model, target)) - (
        count_linear_flops(model, target.length) if which == "self" else 0
    )
    own += count_plain_flops(model, target.length) if recompute == "selective" else 0
    return linear + own + (sum(count(model.encoder_model, source)) if both else 0)


def count_linear_flops(model: ModelConfig, length: int) -> int:
    """Count the operations of linear attention between its projections, without solves.

    Args:
        model: architecture.
        length: positions of a sequence.

    Returns:
        Operations of one sequence, forward, over all layers; 0 without such layers.
    """
    linear = model.linear_attention
    if linear is None:
        return 0
    layers = [layer for layer in _iter_attention_layers(model) if model.is_linear_layer(layer)]
    return sum(2 * linear.count_products(model, layer, length, None) for layer in layers)


def count_plain_flops(model: ModelConfig, length: int) -> int:
    """Count the operations of pairs in attention that no kernel computes: those of an indexer.

    Args:
        model: architecture.
        length: positions of a sequence.

    Returns:
        Operations of one sequence, forward, over all layers; 0 without such layers.
    """
    layers = _iter_attention_layers(model)
    mixers = (mixer for layer in layers for mixer in model.list_mixers(layer))
    return sum(2 * mixer.count_plain_products(model, length) for mixer in mixers)


def _count_backward_products(model: ModelConfig, one: _PackedSequence) -> int:
    """Multiplications of a row in the backward pass alone, over all layers."""
    return sum(
        mixer.count_backward_products(model, one.length, one.list_documents())
        for layer in _iter_attention_layers(model)
        for mixer in model.list_mixers(layer)
    )


def _iter_self_attention_flops(model: ModelConfig, one: _PackedSequence) -> Iterator[int]:
    """A product of query and key and one of weight and value for each pair; in Transformer-XL
    scores of distances.
    """
    yield from _iter_distance_flops(model, one)
    for layer in _iter_attention_layers(model):
        yield 2 * sum(
            _count_mixer_products(model, mixer, layer, one) for mixer in model.list_mixers(layer)
        )


def _count_mixer_products(
    model: ModelConfig,
    mixer: AttentionConfig | LinearAttentionConfig,
    layer: int,
    one: _PackedSequence,
) -> int:
    documents = one.list_documents()
    products: int | None
    if isinstance(mixer, PythonAttentionConfig):
        products = count_measured_products(mixer, model, layer, one.length, documents)
    else:
        products = mixer.count_products(model, layer, one.length, documents)
    if products is not None:
        return products
    scores = _build_score_shape(model)
    width = scores.heads * (scores.key_channels + scores.value_channels)
    return width * _count_pairs(model, layer, one)


def _iter_distance_flops(model: ModelConfig, one: _PackedSequence) -> Iterator[int]:
    # 0 where positions have no matmul.
    for layer in _iter_attention_layers(model):
        if not model.has_attention(layer):
            yield 0
            continue
        row = model.attention.fold_row(one.length)
        # The module multiplies each query with all distances and then chooses.
        computed = (row.blocks * row.queries + one.predicted) * _count_distances(model, one)
        pairs = _count_pairs(model, layer, one) if one.exact else computed
        products = model.position.count_query_products(pairs, one.length + one.predicted)
        yield 2 * model.num_attention_heads * model.head_dim * products


def _count_pairs(model: ModelConfig, layer: int, one: _PackedSequence) -> int:
    own, window = (
        model.attention.count_pairs(one.length, one.list_documents()),
        model.get_attention_window(layer),
    )
    return (
        one.count_query_key_pairs(window, causal=model.family != "encoder") if own is None else own
    )


def _count_distances(model: ModelConfig, one: _PackedSequence) -> int:
    # The module maps the distances to later tokens too.
    row = model.attention.fold_row(one.length)
    return row.earlier + (
        row.queries if one.exact and model.family != "encoder" else 2 * row.queries - 1
    )


def _build_score_shape(model: ModelConfig) -> ScoreShape:
    # The number of keys is not used here.
    return model.attention.build_score_shape(model, 0, is_causal=model.family != "encoder")


def _iter_attention_layers(model: ModelConfig) -> Iterator[int]:
    """Every block by number; a prediction module's is one more like the last."""
    yield from range(model.num_hidden_layers if model.rnn is None else 0)
    yield from [model.num_hidden_layers - 1] * _get_prediction_depth(model)


def _get_prediction_depth(model: ModelConfig) -> int:
    return 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
