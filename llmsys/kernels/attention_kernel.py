"""The decision table of attention: which kernel computes a layer on a device, why, and what it
costs.

Pure functions of a device and a layer's traits, without torch. `llmsys show CONFIG --kernels`
prints their answers.

Invariants:
- From compute capability 8.0 on no kernel of training makes a tensor of length × length, but for
  Transformer-XL's position scores, and for attention dropout where the mask is more than causal.
- Where the fastest kernel cannot compute a layer, the choice names it, the kernel in its place and
  the cost.
"""

from dataclasses import dataclass
from typing import Literal

from llmsys.config.attention_device import AttentionDevice, AttentionDtype
from llmsys.config.section import round_up_to_power_of_two
from llmsys.kernels.key_split import can_split_keys, split_width

# varlen: flash attention over packed sequences (torch's, or llmsys/model/varlen_kernel.py). flex:
# by Triton. sdpa: on CUDA flash or cuDNN, with a table memory-efficient. chunked:
# llmsys/model/cpu_attention.py. eager: plain operations.
KernelName = Literal["varlen", "flex", "sdpa", "chunked", "eager"]

MaskKind = Literal["causal", "bidirectional", "prefix", "cross"]
BiasKind = Literal["none", "alibi", "relative"]

# positions; the chunked path saves probabilities, which grow with their square
MAX_CHUNKED_LENGTH = 2048
MAX_FLASH_WIDTH, MAX_CONSUMER_BACKWARD_WIDTH = 256, 192
# Less shared memory: torch's flash backward refuses wider heads there.
CONSUMER_CAPABILITIES = ((8, 6), (8, 9), (12, 0), (12, 1))
# Queries and keys of one block of flex_attention's mask.
FLEX_BLOCK = 128


@dataclass(frozen=True)
class AttentionTraits:
    """One attention layer in one forward pass.

    Attributes:
        dtype: Dtype of queries, keys and values.
        qk_width: Channels of a query and of a key.
        v_width: Channels of a value.
        length: Positions of a sequence; of the source in cross-attention.
        mask: Keys that a query may see, before documents and window.
        has_documents: Several documents in one row, or padding.
        has_window: Keys at a distance of the window or more are hidden.
        has_softcap: Scores are capped by a tanh.
        has_sinks: Each head has an extra score without a value.
        bias: Bias that is added to the scores.
        has_distance_scores: Transformer-XL's scores of queries and distances.
        has_usual_scale: The factor on the scores is 1 / sqrt(qk_width).
        drops_weights: Attention dropout is active.
        is_cached: Keys come from a key-value cache.
        is_training: A backward pass follows.
        is_banded: Blocks of queries see keys around them, by a table of a few windows (Longformer,
            segment memory).
        has_lsh: Chunks of sorted positions are weighted by their normalizers (Reformer).
        selects_keys: An indexer chooses the keys of each query (DeepSeek-V3.2).
    """

    dtype: AttentionDtype
    qk_width: int
    v_width: int
    length: int
    mask: MaskKind = "causal"
    has_documents: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    bias: BiasKind = "none"
    has_distance_scores: bool = False
    has_usual_scale: bool = True
    drops_weights: bool = False
    is_cached: bool = False
    is_training: bool = True
    is_banded: bool = False
    has_lsh: bool = False
    selects_keys: bool = False

    @property
    def needs_rules(self) -> bool:
        """True where the mask is more than "every key" or "no later key"."""
        return self.has_documents or self.has_window or self.mask == "prefix"


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a layer.

    Attributes:
        kernel: The kernel that runs.
        reason: Why this one.
        has_table: It makes or reads a tensor of queries × keys.
        preferred: The faster kernel that cannot compute the layer; None where the first choice
            runs.
        cost: The price of the kernel in its place; empty without `preferred`.
    """

    kernel: KernelName
    reason: str
    has_table: bool = False
    preferred: KernelName | None = None
    cost: str = ""


def choose_attention_kernel(device: AttentionDevice, traits: AttentionTraits) -> KernelChoice:
    """Choose the kernel of an attention layer.

    Args:
        device: The device that runs it.
        traits: The layer.

    Returns:
        The kernel, the reason, and what it costs where a faster one is impossible.
    """
    if traits.has_lsh:
        return KernelChoice(
            "eager", "chunks of sorted positions, computed again in the backward pass"
        )
    if device.kind == "cpu":
        return _choose_on_cpu(traits)
    if traits.is_banded:
        return KernelChoice(
            "sdpa", "blocks of queries against the keys around them, with a table of that size"
        )
    if traits.has_distance_scores:
        reason = "no fused kernel takes Transformer-XL's product of queries and distances"
        return _choose_table(traits, reason, "varlen")
    if traits.selects_keys:
        return _choose_table(traits, "an indexer chooses the keys of each query", "varlen")
    obstacle = _find_flash_obstacle(device, traits)
    if traits.drops_weights and (traits.needs_rules or not _has_plain_scores(traits)):
        return _choose_table(traits, "varlen and flex have no attention dropout", "varlen")
    if not device.has_fused_kernels:
        return _choose_without_fused_kernels(device, traits)
    if traits.is_cached and (traits.needs_rules or not _has_plain_scores(traits) or obstacle):
        return _choose_table(
            traits, "generation: the table has a row for each new token only", None
        )
    if obstacle is None and _has_plain_scores(traits) and not traits.needs_rules:
        return KernelChoice(
            "sdpa", f"{_describe_mask(traits)}: flash or cuDNN attention without a table"
        )
    if traits.drops_weights:
        return KernelChoice(
            "sdpa", f"memory-efficient attention drops weights; flash attention has {obstacle}"
        )
    obstacle = obstacle or _find_varlen_obstacle(traits)
    if obstacle is None:
        sinks = "; sinks are folded into the log-sum-exp" if traits.has_sinks else ""
        details = f"lengths instead of a table{sinks}; {_describe_version(device)}"
        return KernelChoice("varlen", f"{_describe_mask(traits)}: {details}")
    is_split = (
        traits.dtype != "fp32"
        and not traits.has_window
        and can_split_keys(traits.qk_width, traits.v_width)
    )
    has_memory = device.capability not in CONSUMER_CAPABILITIES
    if is_split and has_memory and _find_varlen_obstacle(traits) is None:
        parts = " and ".join(str(part) for part in split_width(traits.qk_width) if part)
        details = (
            f"flash attention has {obstacle}; Triton kernel of llmsys, keys in parts of {parts} "
            "channels"
        )
        return KernelChoice("varlen", f"{_describe_mask(traits)}: {details}")
    return KernelChoice(
        "flex", f"flash attention has {obstacle}", False, "varlen", _describe_flex_cost(traits)
    )


def choose_ring_kernel(device: AttentionDevice, traits: AttentionTraits) -> KernelChoice:
    """Choose the kernel of an attention layer whose keys come round a ring of ranks.

    Args:
        device: The device that runs it.
        traits: The layer.

    Returns:
        sdpa, for flash attention of whole chunks, or eager, for products of a chunk of queries with
        a rank's keys.
    """
    obstacle = None
    if traits.mask != "causal" or traits.needs_rules:
        obstacle = f"whole chunks of causal queries, not {_describe_mask(traits)}"
    elif traits.bias != "none" or traits.has_softcap:
        obstacle = "no soft cap" if traits.has_softcap else f"no {traits.bias} bias"
    elif device.kind == "cpu":
        obstacle = "one width for keys and values" if traits.qk_width != traits.v_width else None
    else:
        obstacle = (
            _find_flash_obstacle(device, traits)
            if device.has_fused_kernels
            else f"no kernel on {device}"
        )
    if obstacle is None:
        return KernelChoice("sdpa", "flash attention of the chunks of each rank of the ring")
    cost = "scores of 256 queries with the keys of one rank, in fp32"
    return KernelChoice("eager", f"flash attention of a ring has {obstacle}", False, "sdpa", cost)


def _choose_on_cpu(traits: AttentionTraits) -> KernelChoice:
    if traits.is_banded and not traits.drops_weights:
        is_chunked = traits.dtype == "bf16" and not traits.has_distance_scores
        return KernelChoice(
            "chunked" if is_chunked else "sdpa", "blocks of queries against the keys around them"
        )
    has_table = traits.needs_rules or traits.bias != "none" or traits.has_distance_scores
    has_table = has_table or traits.selects_keys
    if _has_eager_scores(traits) or traits.drops_weights:
        what = "dropout" if traits.drops_weights else "soft caps" if traits.has_softcap else "sinks"
        reason = (
            f"torch's CPU kernel has no {what}"
            if what != "dropout"
            else "torch's CPU dropout is slow"
        )
        return KernelChoice("eager", reason, True, "sdpa", _describe_scores(traits))
    is_chunked = (
        traits.dtype == "bf16"
        and traits.bias == "none"
        and not traits.has_distance_scores
        and traits.qk_width == traits.v_width
        and traits.has_usual_scale
        and not traits.is_cached
        and traits.length <= MAX_CHUNKED_LENGTH
    )
    if is_chunked:
        return KernelChoice(
            "chunked",
            "bfloat16 on a CPU: batched products over the keys a chunk can see",
            has_table,
        )
    return KernelChoice("sdpa", _describe_mask(traits), has_table)


def _choose_without_fused_kernels(device: AttentionDevice, traits: AttentionTraits) -> KernelChoice:
    reason = f"flash and flex attention are not known to run on {device}"
    if traits.needs_rules or traits.bias != "none" or _has_eager_scores(traits):
        return _choose_table(traits, reason, "varlen")
    return KernelChoice(
        "sdpa", f"{_describe_mask(traits)}, {reason}", False, "varlen", "unknown: torch chooses"
    )


def _choose_table(
    traits: AttentionTraits, reason: str, preferred: KernelName | None
) -> KernelChoice:
    if _has_eager_scores(traits):
        return KernelChoice("eager", reason, True, preferred or "varlen", _describe_scores(traits))
    table = (
        f"a table of length² = {_format_bytes(traits, 1)} per sequence, and every hidden pair is "
        "computed"
    )
    return KernelChoice("sdpa", reason, True, preferred, table if preferred else "")


def _find_flash_obstacle(device: AttentionDevice, traits: AttentionTraits) -> str | None:
    """Return why flash attention cannot take these queries, keys and values; None where it can.

    torch's fake implementation of the operator checks none of this.
    """
    if traits.dtype == "fp32":
        return "no fp32"
    if traits.qk_width != traits.v_width:
        return f"one width for keys and values, not {traits.qk_width} and {traits.v_width}"
    if traits.qk_width > MAX_FLASH_WIDTH:
        return f"heads of at most {MAX_FLASH_WIDTH} channels, not {traits.qk_width}"
    if traits.qk_width % 8:
        return f"head widths that are multiples of 8, not {traits.qk_width}"
    is_wide = traits.is_training and traits.qk_width > MAX_CONSUMER_BACKWARD_WIDTH
    if is_wide and device.capability in CONSUMER_CAPABILITIES:
        return f"no backward for {traits.qk_width} channels on {device}"
    return None


def _find_varlen_obstacle(traits: AttentionTraits) -> str | None:
    if traits.has_softcap:
        return "no soft cap"
    if traits.bias != "none":
        return f"no {'ALiBi' if traits.bias == 'alibi' else 'relative'} bias"
    if traits.mask == "prefix":
        return "no prefix mask"
    if traits.mask == "cross":
        return "no rule for targets without a source"
    if traits.mask == "bidirectional" and traits.has_window:
        return "no window in both directions that is tested"
    return None


def _has_plain_scores(traits: AttentionTraits) -> bool:
    return traits.bias == "none" and not _has_eager_scores(traits)


def _has_eager_scores(traits: AttentionTraits) -> bool:
    return traits.has_softcap or traits.has_sinks


def _describe_mask(traits: AttentionTraits) -> str:
    extras = [
        name
        for name, has in (("documents", traits.has_documents), ("window", traits.has_window))
        if has
    ]
    return ", ".join([traits.mask, *extras])


def _describe_version(device: AttentionDevice) -> str:
    newer = {9: 3, 10: 4}.get(device.capability[0] if device.capability else 0)
    return "FlashAttention-2" + (
        f", or {newer} where activate_flash_attention_impl was called" if newer else ""
    )


def _describe_flex_cost(traits: AttentionTraits) -> str:
    costs = [f"blocks of {FLEX_BLOCK} × {FLEX_BLOCK} that a border cuts are computed whole"]
    computed = round_up_to_power_of_two(traits.qk_width, 16) + round_up_to_power_of_two(
        traits.v_width, 16
    )
    if computed != (given := traits.qk_width + traits.v_width):
        costs.append(f"widths are padded to powers of two, {computed / given:.2f} × the FLOPs")
    if traits.dtype == "fp32":
        costs.append("fp32 products")
    return "; ".join(costs)


def _describe_scores(traits: AttentionTraits) -> str:
    return (
        f"scores of length² = {_format_bytes(traits, 4)} per head and sequence in fp32, several "
        "times"
    )


def _format_bytes(traits: AttentionTraits, scale: int) -> str:
    """Return the size of a table of length × length as text, with `scale` bytes an element, or
    those of the dtype.
    """
    width = scale if scale > 1 else 4 if traits.dtype == "fp32" else 2
    return f"{traits.length**2 * width / 2**20:.4g} MiB"
