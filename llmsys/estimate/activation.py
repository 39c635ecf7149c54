"""An estimate of what one forward pass keeps for its backward on one rank.

It depends on kernels, so it is named an estimate wherever it is shown. Counted are the inputs of norms, products and
activations; what kernels keep beside them is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmsys.config.attention import Latent
from llmsys.config.feed_forward import GATED, FeedForwardConfig
from llmsys.config.layout import Layout
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.block_tensors import block_tensors
from llmsys.estimate.memory import FP32, compute_bytes
from llmsys.estimate.parameters import layer_kind, visits_of
from llmsys.estimate.tensors import has_logits, model_tensors


@dataclass(frozen=True)
class ActivationBytes:
    """What one forward pass keeps for its backward on one rank; an estimate.

    `blocks` with attention that keeps no probabilities, `probabilities` what is added where they are kept (as on CPU),
    `logits` of the whole micro-batch with their fp32 copy and gradient, `gathered` the whole weights in use under FSDP.
    """

    blocks: int
    probabilities: int
    logits: int
    gathered: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.blocks + self.probabilities + self.logits + self.gathered


def activation_bytes(config: RunConfig, layout: Layout) -> ActivationBytes:
    """Estimate for one micro-batch of the configured precision."""
    model, size = config.model, compute_bytes(config)
    share = -(-config.batch.sequences_per_step // layout.world_size)
    sequences = config.batch.micro_of(share)
    source, length = batch_lengths(config)
    depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
    passes = 1 + depth if has_logits(model) else 0
    return ActivationBytes(
        blocks=int(sequences * sum(_block_values(model, length, source)) * size),
        probabilities=sequences * sum(_probabilities(model, length, source)) * size,
        logits=passes * sequences * length * model.vocab_size * (size + 2 * FP32),
        gathered=_gathered(config, layout),
    )


def batch_lengths(config: RunConfig) -> tuple[int, int]:
    """Tokens of one window at the encoder and at the decoder; the same number where there is one stack."""
    length = config.batch.sequence_length
    target = getattr(config.batch, "target_length", None)
    return length, target if target is not None and config.model.family == "encoder_decoder" else length


def _block_values(model: ModelConfig, length: int, source: int) -> Iterator[float]:
    """Kept values of one sequence, block by block."""
    for layer in range(model.num_hidden_layers):
        yield length * (_attention_channels(model, layer) + _feed_forward_channels(model, layer))
    if model.multi_token_prediction is not None:
        last, extra = model.num_hidden_layers - 1, 6 * model.hidden_size  # two norms, and what the projection reads
        channels = _attention_channels(model, last) + _feed_forward_channels(model, last) + extra
        yield model.multi_token_prediction.depth * length * channels
    if model.family == "encoder_decoder":
        width = model.num_attention_heads * model.head_dim
        yield model.num_hidden_layers * (length * 2 * width + source * 2 * model.num_key_value_heads * model.head_dim)
        yield from _block_values(model.encoder_shape, source, source)


def _probabilities(model: ModelConfig, length: int, source: int) -> Iterator[int]:
    """Attention's weights of one sequence, block by block; causal kernels keep the lower triangle."""
    pairs = length**2 if model.family == "encoder" else length * (length + 1) // 2
    depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
    yield (model.num_hidden_layers + depth) * model.num_attention_heads * pairs
    if model.family == "encoder_decoder":
        yield model.num_hidden_layers * model.num_attention_heads * length * source
        yield from _probabilities(model.encoder_shape, source, source)


def _attention_channels(model: ModelConfig, layer: int) -> int:
    """Per token: inputs and outputs of the block's norms, queries, keys and values before and after rotation."""
    rows = block_tensors(model, "block", (layer,))
    norms = sum(row.name.endswith("_norm.weight") and row.shape == (model.hidden_size,) for row in rows)
    attention = model.attention
    if attention.kind == "latent":
        return 2 * norms * model.hidden_size + _latent_channels(model, attention)
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    again = int(model.rotates(layer)) + int(attention.qk_norm != "none")
    return 2 * norms * model.hidden_size + 2 * queries + 2 * keys + again * (queries + keys)


def _latent_channels(model: ModelConfig, latent: Latent) -> int:
    """Both latents before and after their norms, whole queries and keys, values, and the weighted sum."""
    heads, query_width = model.num_attention_heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    latents = 2 * (latent.q_lora_rank or 0) + 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
    return latents + heads * (3 * query_width + 2 * latent.v_head_dim)


def _feed_forward_channels(model: ModelConfig, layer: int) -> float:
    moe = model.moe
    if moe is None or not model.is_moe_layer(layer):
        return _kept(model.feed_forward) * model.intermediate_size
    # Of each visit: the sorted input and the output beside the inner channels; router logits and scores.
    routed = visits_of(moe) * (2 * model.hidden_size + _kept(moe.expert) * moe.moe_intermediate_size)
    return routed + _kept(moe.expert) * moe.shared_width + 2 * moe.num_experts


def _kept(config: FeedForwardConfig) -> int:
    """gate, up, activated gate and their product; or the input and output of the activation."""
    return 4 if config.kind in GATED else 2


def _gathered(config: RunConfig, layout: Layout) -> int:
    """FSDP keeps what is outside blocks whole during a step, and two blocks: one in use, one on its way."""
    if config.engine.kind != "torch":
        return 0
    rows = model_tensors(config.model)
    root = sum(row.count for row in rows if not row.layers)
    blocks: dict[str, int] = {}
    for row in rows:
        if row.layers:
            kind = layer_kind(config.model, row)
            blocks[kind] = blocks.get(kind, 0) + row.each // (layout.expert if row.routed else 1)
    return compute_bytes(config) * (root + 2 * max(blocks.values()))
