"""Memory of a served model: weights, cached keys and values, activations; and which models can be
served.

Invariants:
- Cached bytes are those of keys and values that a decoder must keep: windows, shared heads and
  latents count as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.serving import ServingConfig
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.model_tensors import list_model_tensors

# Bits of a weight. int4 has a 16-bit scale for each group of 128 (GPTQ, AWQ); scales of others are
# per channel.
WEIGHT_BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4 + 16 / 128}
CACHE_BYTES = {"bf16": 2, "fp8": 1}
# Matrices that stay in bf16 where others are quantized.
UNQUANTIZED = frozenset(
    {"embedding", "positions", "norms", "router", "head", "head_bias", "head_other"}
)
# Prompts go through in pieces of this many tokens, which bounds the memory of activations.
PREFILL_CHUNK = 8192
# Share of the device's memory that a server takes for weights, cache and activations.
MEMORY_SHARE = 0.95


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on one device."""

    weights: float
    cache: float
    workspace: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.cache + self.workspace


def check_served_model(model: ModelConfig, config: ServingConfig, gpus: int) -> None:
    """Raise ConfigError for a model that generates nothing, or that cannot be divided by the
    devices.

    Args:
        model: architecture.
        config: the load.
        gpus: devices that share each layer.

    Raises:
        ConfigError: with the value, the rule and the next step.
    """
    if model.family == "encoder" or not model.head.has_logits:
        raise ConfigError(
            f"--serve: family={model.family} generates no tokens. Give a decoder or an "
            "encoder-decoder."
        )
    if model.linear_attention is not None:
        raise ConfigError(
            f"--serve: linear_attention.kind={model.linear_attention.kind} keeps a state of "
            "fixed size, which a serving estimate does not count. Leave --serve out, or use full "
            "or sliding attention in all layers."
        )
    if getattr(model.attention, "sparse", None) is not None:
        raise ConfigError(
            "--serve: attention.sparse keeps keys of an indexer and reads those that it chooses, "
            "which a serving estimate does not count. Leave --serve out, or set attention.sparse "
            "to null."
        )
    if model.rnn is not None or model.attention.kind not in ("multi_head", "latent"):
        kind = model.attention.kind if model.rnn is None else model.rnn.kind
        raise ConfigError(
            f"--serve: {kind} has no known cache. Use attention.kind=multi_head or latent."
        )
    if model.num_attention_heads % gpus:
        raise ConfigError(
            f"--serve: {gpus} devices do not divide "
            f"num_attention_heads={model.num_attention_heads}. Use --gpus with a divisor of it."
        )
    longest = model.max_position_embeddings
    whole = config.output if model.family == "encoder_decoder" else config.prompt + config.output
    if model.position.kind == "learned" and max(whole, config.prompt) > longest:
        raise ConfigError(
            f"--serve: prompt and output are {whole} tokens, but positions are learned up to "
            f"{longest}. Use fewer."
        )


def count_cached_values(
    model: ModelConfig, config: ServingConfig, tokens: int, gpus: int = 1
) -> int:
    """Return the cached numbers of one request on one device.

    Args:
        model: architecture.
        config: the load; the prompt is the source of an encoder-decoder.
        tokens: positions in the cache of the decoder.
        gpus: devices that share the heads; latents are on each of them.

    Returns:
        Numbers in keys and values of all layers. Bytes are these times those of `cache`.
    """
    if model.attention.kind == "latent":
        per_position = model.attention.kv_lora_rank + model.attention.qk_rope_head_dim
    else:
        per_position = 2 * -(-model.num_key_value_heads // gpus) * model.head_dim
    layers = [one for one in range(model.num_hidden_layers) if model.has_attention(one)]
    windows = [model.get_attention_window(layer) for layer in layers]
    own = sum(tokens if window is None else min(window, tokens) for window in windows)
    crossed = model.num_hidden_layers * config.prompt if model.family == "encoder_decoder" else 0
    return per_position * (own + crossed)


def estimate_weight_bytes(
    model: ModelConfig, rows: Sequence[ParameterTensor], weights: str, gpus: int = 1
) -> float:
    """Return the bytes of the weights on one device; vectors are on each.

    Args:
        model: architecture.
        rows: its tensors.
        weights: dtype of matrices in blocks.
        gpus: devices that share every matrix.

    Returns:
        Bytes.
    """
    return sum(
        row.num_elements * get_weight_bytes(row, weights) / (gpus if len(row.shape) > 1 else 1)
        for row in rows
    )


def get_weight_bytes(row: ParameterTensor, weights: str) -> float:
    """Return the bytes of one number of a tensor whose model's matrices are stored as `weights`."""
    is_kept = row.component in UNQUANTIZED or len(row.shape) < 2
    return (16.0 if is_kept else WEIGHT_BITS[weights]) / 8


def estimate_serving_memory(model: ModelConfig, config: ServingConfig, gpus: int) -> ServingMemory:
    """Return the bytes on one device while `batch` requests are at the end of their answers.

    Args:
        model: architecture.
        config: the load.
        gpus: devices that share each layer.
    """
    kept = config.output if model.family == "encoder_decoder" else config.prompt + config.output
    cache = (
        config.batch * count_cached_values(model, config, kept, gpus) * CACHE_BYTES[config.cache]
    )
    width = model.intermediate_size
    if model.moe is not None:
        width = max(width, int(model.moe.moe_intermediate_size * model.moe.visits_per_token))
    chunk = min(PREFILL_CHUNK, config.batch * config.prompt)
    # Stream, its norm, and two halves of a gated feed-forward, in bf16; logits of each request in
    # float32.
    channels = 4 * model.hidden_size + 2 * width / gpus
    workspace = 2 * chunk * channels + 4 * config.batch * model.vocab_size
    return ServingMemory(
        estimate_weight_bytes(model, list_model_tensors(model), config.weights, gpus),
        cache,
        workspace,
    )


def find_largest_batch(
    model: ModelConfig, config: ServingConfig, device: DeviceProfile, gpus: int
) -> int:
    """Return the requests of this length that fit in memory together; 0 if not even one fits.

    Args:
        model: architecture.
        config: the load; its batch is not used.
        device: profile with the memory of a device.
        gpus: devices that share each layer.
    """
    low, high = 0, 1
    room = device.memory_bytes * MEMORY_SHARE

    def is_small_enough(batch: int) -> bool:
        return (
            estimate_serving_memory(model, config.model_copy(update={"batch": batch}), gpus).total
            <= room
        )

    while is_small_enough(high) and high < 10**6:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_small_enough(middle) else (low, middle)
    return low
