"""Estimate serving: memory, time to the first token, tokens per second, and cost per million
tokens.

A prompt is one causal pass; each further token reads all weights that the batch uses and the cache
of every request. Kernel times are the device profile's curve (llmsys/estimate/device_profile.py),
with one kernel launch each.
"""

from dataclasses import asdict, dataclass

from llmsys.config.model import ModelConfig
from llmsys.config.serving import ServingConfig
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.communication_time import RankGroup, estimate_small_all_reduce_seconds
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.flops import count_flops
from llmsys.estimate.model_tensors import count_active_elements, is_head_tied, list_model_tensors
from llmsys.estimate.serving_memory import (
    CACHE_BYTES,
    MEMORY_SHARE,
    PREFILL_CHUNK,
    check_served_model,
    count_cached_values,
    estimate_serving_memory,
    find_largest_batch,
    get_weight_bytes,
)
from llmsys.estimate.serving_output import (
    ServingMoney,
    ServingOutput,
    ServingRates,
    TimedServingOutput,
)

# Kernels of a block with fused norms: two norms, four matrices, rotation, attention, cache write,
# activation.
KERNELS_PER_BLOCK = 10


@dataclass(frozen=True)
class ServingBench:
    """A served model on a device: what the times of prompts and of further tokens share."""

    model: ModelConfig
    config: ServingConfig
    device: DeviceProfile
    gpus: int

    @property
    def matmul_flops(self) -> float:
        """Operations per second of large matrices: 8-bit ones where weights are fp8 and the
        device has them.
        """
        kernels = self.device.efficiency
        if self.config.weights == "fp8" and "fp8" in self.device.peak_flops:
            return self.device.get_peak_flops("fp8") * kernels.products_fp8
        return self.device.get_peak_flops("bf16") * kernels.products

    @property
    def bandwidth(self) -> float:
        """Bytes per second of reading weights and cache."""
        return self.device.memory_bandwidth * self.device.efficiency.memory

    def estimate_overhead(self, tokens: int) -> float:
        """Return the seconds of launches and of two all-reduces in each block."""
        model = self.model
        blocks = model.num_hidden_layers
        seconds = blocks * KERNELS_PER_BLOCK * self.device.efficiency.launch_seconds
        if self.gpus == 1:
            return seconds
        group = RankGroup(self.gpus, 1)
        return seconds + 2 * blocks * estimate_small_all_reduce_seconds(
            group, 2 * tokens * model.hidden_size, self.device
        )

    def estimate_weight_seconds(self, tokens: int) -> float:
        """Return the seconds of reading the weights that `tokens` tokens use, each once."""
        total = 0.0
        for row in list_model_tensors(self.model):
            if row.input is None or row.input == "source":
                continue
            share = self._estimate_touched_share(tokens) if row.is_routed else 1.0
            total += row.num_elements * share * get_weight_bytes(row, self.config.weights)
        if is_head_tied(self.model):
            total += 2 * self.model.vocab_size * self.model.hidden_size
        return total / self.gpus / self.bandwidth

    def _estimate_touched_share(self, tokens: int) -> float:
        """Return the share of experts that at least one of `tokens` tokens visits, if all are
        equally likely.
        """
        if self.model.moe is None:
            return 1.0
        return float(
            1 - (1 - self.model.moe.visits_per_token / self.model.moe.num_experts) ** tokens
        )

    def count_prompt_flops(self) -> int:
        """Return the operations of one prompt; only its last token goes through the head."""
        count = count_flops(self.model, self.config.prompt, 1, "causal", target_length=1)
        logits = 2 * self.model.vocab_size * self.model.hidden_size * (self.config.prompt - 1)
        return count.forward - (0 if self.model.family == "encoder_decoder" else logits)

    def count_token_flops(self) -> int:
        """Return the operations of one further token, halfway through the answer."""
        rows = list_model_tensors(self.model)
        matrices = sum(
            count_active_elements(self.model, row) * row.steps
            for row in rows
            if row.input in ("token", "visit")
        )
        if is_head_tied(self.model):
            matrices += self.model.vocab_size * self.model.hidden_size
        return 2 * matrices + self._count_token_attention()

    def _count_token_attention(self) -> int:
        model, heads = self.model, self.model.num_attention_heads
        # scores against latents, the up-projection moved to the query
        if model.attention.kind == "latent":
            width = heads * (2 * model.attention.kv_lora_rank + model.attention.qk_rope_head_dim)
        else:
            width = 2 * heads * model.head_dim
        cached = count_cached_values(model, self.config, self.mean_positions)
        return 2 * width * cached // max(1, self._values_per_position)

    @property
    def _values_per_position(self) -> int:
        model = self.model
        if model.attention.kind == "latent":
            return model.attention.kv_lora_rank + model.attention.qk_rope_head_dim
        return 2 * model.num_key_value_heads * model.head_dim

    @property
    def mean_positions(self) -> int:
        """Positions in the decoder's cache halfway through an answer."""
        before = 0 if self.model.family == "encoder_decoder" else self.config.prompt
        return before + self.config.output // 2

    def estimate_first_token_seconds(self) -> float:
        """Return the seconds from the start of a prompt to its first token, alone on the
        devices.
        """
        count = count_flops(self.model, self.config.prompt, 1, "causal", target_length=1)
        kernels = self.device.efficiency
        attention = self.device.get_peak_flops("bf16") * min(
            1.0, kernels.attention * kernels.native_attention
        )
        chunks = -(-self.config.prompt // PREFILL_CHUNK)
        linear = self.count_prompt_flops() - count.attention
        seconds = linear / self.matmul_flops + count.attention / attention
        tokens = min(self.config.prompt, PREFILL_CHUNK)
        return seconds / self.gpus + chunks * (
            self.estimate_weight_seconds(tokens) + self.estimate_overhead(tokens)
        )

    def estimate_step_seconds(self) -> float:
        """Return the seconds of one further token for every request of the batch."""
        batch = self.config.batch
        cached = count_cached_values(self.model, self.config, self.mean_positions, self.gpus)
        reads = batch * cached * CACHE_BYTES[self.config.cache] / self.bandwidth
        compute = batch * self.count_token_flops() / self.matmul_flops / self.gpus
        return self.estimate_weight_seconds(batch) + reads + compute + self.estimate_overhead(batch)


def estimate_serving(
    model: ModelConfig,
    config: ServingConfig,
    device: DeviceProfile | None,
    cluster: ClusterCosts,
    gpus: int,
) -> ServingOutput:
    """Estimate a load of a served model.

    Args:
        model: architecture.
        config: the load.
        device: profile; None: memory only.
        cluster: price of an hour.
        gpus: devices that share every layer (tensor parallelism).

    Returns:
        The object that `llmsys estimate --serve --json` prints; with a device a
        `TimedServingOutput`.

    Raises:
        ConfigError: the model generates nothing, or the devices do not divide its heads.
    """
    # a server does not load those modules
    model = model.model_copy(update={"multi_token_prediction": None})
    check_served_model(model, config, gpus)
    memory = estimate_serving_memory(model, config, gpus)
    result = ServingOutput(
        # every setting counts as given, so that --json prints the defaults too
        load=ServingConfig(**config.model_dump()),
        gpus=gpus,
        memory_bytes={**asdict(memory), "total": memory.total},
        cache_bytes_per_request=memory.cache / config.batch,
    )
    if device is None:
        return result
    bench = ServingBench(model, config, device, gpus)
    first, step = bench.estimate_first_token_seconds(), bench.estimate_step_seconds()
    answered = config.batch * first + config.output * step
    flops = config.batch * (bench.count_prompt_flops() + config.output * bench.count_token_flops())
    rate = cluster.price_per_hour * gpus / 3600 * 1e6
    return TimedServingOutput(
        device=device.name,
        device_memory_bytes=device.memory_bytes,
        fits=memory.total <= device.memory_bytes * MEMORY_SHARE,
        largest_batch=find_largest_batch(model, config, device, gpus),
        first_token_seconds=first,
        all_first_tokens_seconds=config.batch * first,
        step_seconds=step,
        tokens_per_second=ServingRates(
            one_request=1 / step,
            decoding=config.batch / step,
            with_prompts=config.batch * config.output / answered,
        ),
        utilisation=flops / (answered * gpus * device.get_peak_flops("bf16")),
        money=ServingMoney(
            currency=cluster.currency,
            price_per_hour=cluster.price_per_hour,
            per_million_prompt_tokens=rate * first / config.prompt,
            per_million_output_tokens=rate * step / config.batch,
            per_million_tokens=rate * answered / (config.batch * (config.prompt + config.output)),
        ),
        **dict(result),
    )
