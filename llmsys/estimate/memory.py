"""Bytes of training state on the fullest rank, exactly, and an estimate of what a forward pass keeps.

State is what lives as long as the run: weights, fp32 masters, gradients, moments, split as the engine splits them.
Activations depend on kernels and are an estimate, named so wherever they are shown.
"""

from dataclasses import dataclass
from math import prod

from llmsys.config.layout import Layout
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.tensors import TensorRow, model_tensors

FP32, MOMENTS = 4, 8  # bytes of one fp32 value, and of Adam's two


@dataclass(frozen=True)
class StateBytes:
    """Bytes on rank 0, which never holds less than another rank. `weights` are copies beside the masters."""

    weights: int
    masters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.masters + self.gradients + self.moments


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


def planned_layout(config: RunConfig) -> Layout:
    """The layout for the processes that the config starts; a fixed `shard` says how many ranks there are."""
    fixed = config.layout.shard != -1
    world_size = config.layout.replicate * config.layout.shard if fixed else max(1, config.launch.processes)
    return config.layout.fit(world_size, config.model)


def state_bytes(config: RunConfig, layout: Layout) -> StateBytes:
    """State of the configured engine under a resolved layout."""
    if config.engine.kind == "deepspeed":
        return _zero_bytes(config, layout, config.engine.zero_stage)
    local = sum(_shard_elements(row, layout) * row.copies for row in model_tensors(config.model))
    # FSDP2: the shards are the fp32 masters; whole weights exist only while they are used.
    return StateBytes(weights=0, masters=FP32 * local, gradients=FP32 * local, moments=MOMENTS * local)


def activation_bytes(config: RunConfig, layout: Layout) -> ActivationBytes:
    """Estimate for one micro-batch of the configured precision."""
    model, size = config.model, compute_bytes(config)
    share = -(-config.batch.sequences_per_step // layout.world_size)
    sequences = min(config.batch.micro_sequences or share, share)
    length = config.batch.sequence_length
    tokens = sequences * length
    dense = model.num_dense_layers * _dense_channels(model)
    mixture = model.num_moe_layers * _mixture_channels(model)
    both = model.num_hidden_layers * _attention_channels(model)
    triangle = length * (length + 1) // 2
    return ActivationBytes(
        blocks=tokens * (both + dense + mixture) * size,
        probabilities=sequences * model.num_attention_heads * triangle * model.num_hidden_layers * size,
        logits=tokens * model.vocab_size * (size + 2 * FP32),
        gathered=_gathered(config, layout),
    )


def compute_bytes(config: RunConfig) -> int:
    """Bytes of one weight or activation inside products."""
    return 2 if config.train.precision == "bf16" else FP32


def _shard_elements(row: TensorRow, layout: Layout) -> int:
    """Elements of one copy on rank 0: experts are dealt over the expert axis, then the first dim is split."""
    first, rest = row.shape[0], prod(row.shape[1:])
    if row.component == "experts" and layout.expert > 1:
        dealt = first // layout.expert
        return -(-dealt // (layout.shard // layout.expert)) * rest
    return -(-first // layout.shard) * rest


def _zero_bytes(config: RunConfig, layout: Layout, stage: int) -> StateBytes:
    """ZeRO flattens each parameter group, pads it to twice the number of ranks, and splits it evenly over them.

    Groups: with and without weight decay; experts, embeddings, the rest. Dealt experts are split over their own
    replicas only.
    """
    whole = split = 0
    groups: dict[tuple[str, bool], int] = {}
    for row in model_tensors(config.model):
        role = {"experts": "experts", "embedding": "embedding", "head": "embedding"}.get(row.component, "dense")
        key = (role, len(row.shape) >= 2)
        groups[key] = groups.get(key, 0) + row.count
    for (role, _), elements in groups.items():
        dealt = layout.expert if role == "experts" else 1
        local, ranks = elements // dealt, layout.world_size // dealt
        whole += local
        split += -(-local // (2 * ranks)) * 2
    gradients = split if stage >= 2 else whole
    return StateBytes(compute_bytes(config) * whole, FP32 * split, FP32 * gradients, MOMENTS * split)


def _attention_channels(model: ModelConfig) -> int:
    """Per token and layer: the two norms' inputs and outputs, q, k, v before and after rotation, attention's output."""
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    rotated = queries + keys if model.position.kind == "rope" else 0
    return 4 * model.hidden_size + 2 * queries + 2 * keys + rotated


def _dense_channels(model: ModelConfig) -> int:
    """gate, up, activated gate and their product; or the input and output of the activation."""
    return (4 if model.feed_forward.kind == "swiglu" else 2) * model.intermediate_size


def _mixture_channels(model: ModelConfig) -> int:
    if model.moe is None:
        return 0
    width, visits = model.moe.moe_intermediate_size, model.moe.num_experts_per_tok
    routed = visits * (2 * model.hidden_size + 4 * width)  # sorted inputs, gate, up, activated gate, product, outputs
    return routed + 4 * width * model.moe.num_shared_experts + 2 * model.moe.num_experts


def _gathered(config: RunConfig, layout: Layout) -> int:
    """FSDP keeps the embedding, last norm and head whole during a step, and two blocks: one in use, one on its way."""
    if config.engine.kind != "torch":
        return 0
    rows = model_tensors(config.model)
    root = sum(row.count for row in rows if row.layers is None)
    blocks: dict[int, int] = {}
    for row in rows:
        if row.layers is not None:
            dealt = layout.expert if row.component == "experts" else 1
            blocks[row.layers.start] = blocks.get(row.layers.start, 0) + row.each // dealt
    return compute_bytes(config) * (root + 2 * max(blocks.values()))
